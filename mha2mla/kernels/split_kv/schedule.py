"""Format of the decode schedule, which host, device and oracle share.

A cache is read in tiles of ``TILE_TOKENS`` tokens. A fixed number of CTAs each take a contiguous piece of the
concatenation of all attended tiles of all sequences. The part of one sequence in one CTA is a *fragment*. A sequence
that lies in one fragment is written to the output at once; of a sequence in several fragments each writes a *partial*
(output and log-sum-exp) that the combine kernel merges. ``plan_kernel.py`` computes the schedule on the device;
``reference.plan_fragments`` is its oracle.
"""

TILE_TOKENS = 64
FRAGMENT_TILES = 1  # what starting and ending a sequence costs, in tiles
MAX_BATCH = 4096  # sequences that the planner's shared memory holds
FIELDS = 16  # columns of a schedule


class Column:
    """Columns of ``schedule`` [num_ctas + B, FIELDS] int32, of which a row is one fragment.

    Row i < num_ctas is the first fragment of CTA i; rows that nothing points at are unspecified.
    """

    SEQUENCE = 0
    FIRST = 1  # first tile, counted among the attended tiles of the sequence
    TILES = 2  # number of tiles, > 0
    SLOT = 3  # place of its partial, partial[slot // 2, slot % 2]; -1: the fragment is the whole sequence
    NEXT = 4  # first fragments only: row of fragment f > 0 of this CTA is NEXT + f
    COUNT = 5  # first fragments only: fragments of this CTA; 0: the CTA is idle, the rest of the row unspecified
    START = 6  # first token that is not padding
    STOP = 7  # tokens cached
    LOW = 8  # first token of the sliding window of the first query; START without a window
    SINK_STOP = 9  # tokens START ... SINK_STOP - 1 are sinks that lie before LOW
    TILE0 = 10  # tile (token // TILE_TOKENS) of attended tile 0
    SINK_TILES = 11  # attended tiles 0 ... SINK_TILES - 1 follow TILE0, the others WINDOW_TILE
    WINDOW_TILE = 12
