"""The choice of a kernel of a split-KV op, with its tiles: what selection returns and a kernel is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from mha2mla.kernels.split_kv.limits import MAX_SPLITS
from mha2mla.kernels.split_kv.tiling import RowTiling

CONFIGURATION = (
    *("kernel", "variant", "rows", "head_tiles", "token_tiles", "num_stages", "rope_stages", "warpgroups"),
    *("ctas_per_sm", "block_tokens"),
)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel file and its static arguments, with the reason it was chosen. A kernel reads those that it has.

    Attributes:
        kernel: its name; the op's ``build.py`` knows the file.
        tiling: which query rows one CTA serves.
        block_tokens: cached tokens a CTA works on at a time.
        num_stages: tiles of the cache (of the latent; of keys, and of values) in flight, for each reader of them; of
            ``swap_ab_cluster`` pieces of tiles.
        rope_stages: chunks of rotary keys in flight, where they have a ring of their own.
        threads: of a CTA.
        warpgroups: that compute.
        ctas_per_sm: CTAs that are resident on a multiprocessor.
        reason: in words, with the numbers.
        variant: of the kernel where it has several.
        cluster_size: CTAs that share the columns of a tile of query rows.
    """

    kernel: str
    tiling: RowTiling
    block_tokens: int = 64
    num_stages: int = 1
    rope_stages: int = 0
    threads: int = 128
    warpgroups: int = 1
    ctas_per_sm: int = 1
    reason: str = field(default="", compare=False)  # the same kernel is compiled once, whatever it was chosen for
    variant: str = ""
    cluster_size: int = 1

    def configuration(self) -> dict[str, str | int]:
        """The columns :data:`CONFIGURATION` of a benchmark's row."""
        return {name: getattr(self.tiling if hasattr(self.tiling, name) else self, name) for name in CONFIGURATION}

    def num_ctas(self, num_sms: int) -> int:
        """CTAs or clusters per tile of query rows that are resident at once on a GPU of ``num_sms`` multiprocessors."""
        apiece = self.tiling.num_tiles * self.cluster_size
        return max(1, min(MAX_SPLITS, num_sms * self.ctas_per_sm // apiece))
