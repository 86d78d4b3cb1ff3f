"""Selection of a decode kernel over integer codes of latents, and refusals. Arithmetic only, no TileLang."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from mha2mla.geometry import CODE_BLOCK, code_bytes
from mha2mla.kernels.mla_decode import selection
from mha2mla.kernels.mla_decode.selection import DecodeShape
from mha2mla.kernels.split_kv.choice import (
    HOPPER,
    Candidates,
    KernelChoice,
    RowTiling,
    candidate,
    first_refusal,
    rank_choices,
    shared_memory_limit,
)

BITS = (2, 3, 4, 8)
PIECE = 16  # coded rows that one bulk copy brings
LOADING_REGISTERS = {1: 56, 2: 48}  # by CTAs a multiprocessor
LEAST_WIDENING = 72  # registers of a thread that dequantises a unit of 16 elements
# Registers that a thread that computes does without, and those of one that loads, in the order tried.
LEAN = ((0, 56), (0, 40), (selection.LEAN, 40), (20, 40))
LEAST_WIDENING_KEYS = 56  # as LEAST_WIDENING, one unit at a time


def bits_of(width: int, row_bytes: int) -> int | None:
    """Bits of a coded row of ``width`` elements, which its bytes tell; None where they are no row's."""
    return next((bits for bits in BITS if code_bytes(width, bits) == row_bytes), None)


@dataclass(frozen=True)
class CodedShape(DecodeShape):
    """:class:`DecodeShape` of a call over coded rows of ``row_bytes`` bytes."""

    row_bytes: int = 0

    @property
    def bits(self) -> int | None:
        """Same as :func:`bits_of`."""
        return bits_of(self.kv_lora_rank, self.row_bytes)


def refusal(shape: CodedShape, *, has_rope_cache: bool = True) -> str | None:
    """Why no TileLang kernel serves a shape on any GPU, or None."""
    width, bits = shape.kv_lora_rank, " or ".join(map(str, BITS))
    formats = f"kernels take codes of {bits} bits in whole blocks of {CODE_BLOCK} elements"
    is_row = shape.bits is not None and width % CODE_BLOCK == 0
    own = (
        (is_row, f"a row of {width} elements has {shape.row_bytes} bytes", formats),
        (shape.qk_rope_head_dim > 0, "qk_rope_head_dim is 0", "kernels over codes take keys that have a rotary part"),
    )
    return first_refusal(own) or selection.refusal(shape, has_rope_cache=has_rope_cache)


def registers_of(
    needed: int, roles: int, wideners: int, resident: int, loading: int, makers: int = 0, key: int = 0
) -> tuple[int, ...] | None:
    """Registers of a thread that computes, makes keys, loads, dequantises; None if they are not enough."""
    launched = 65536 // (resident * roles * 128) // 8 * 8
    loading = min(loading, launched)
    pool = launched * roles - loading - makers * key
    computing = min(240, max(launched, -(-needed // 8) * 8))
    widening = min(240, (pool - computing) // wideners // 8 * 8)
    spare = pool - computing - wideners * min(widening, 128)
    computing = min(240, computing + max(0, spare) // 8 * 8)
    fits = needed <= computing and widening >= (LEAST_WIDENING_KEYS if makers else LEAST_WIDENING)
    return (computing, key, loading, min(widening, 128)) if fits else None


def key_registers(needed: int, columns: int, makers: int, wideners: int, resident: int) -> tuple[int, ...] | None:
    """:func:`registers_of` where warpgroups make keys of so many columns, as lean as they have to be."""
    key = -(-(4 * selection.key_steps(columns) + selection.KEY_OVERHEAD) // 8) * 8
    each = (
        registers_of(needed - lean, 2 + makers + wideners, wideners, resident, loading, makers, key)
        for lean, loading in LEAN
    )
    return next((registers for registers in each if registers), None)


def ring_bytes(shape: CodedShape, pieces: int) -> int:
    """Bytes of shared memory of so many pieces of coded rows, with their barriers and 1 KiB for alignment."""
    return pieces * (PIECE * shape.row_bytes + 16) + 1024


def ws_choices(shape: CodedShape, tiling: RowTiling, limit: int) -> Candidates:
    """Few tiles first, then tiles in flight (to two), then two CTAs or two warpgroups that dequantise."""
    latent = selection.padded_latent_columns(shape.kv_lora_rank, 128)
    rope = selection.rope_blocks(tiling, shape.qk_rope_head_dim)
    if shape.kv_lora_rank > selection.WIDE_LATENT or rope.block_rows < tiling.rows:
        return
    needed = selection.accumulators(latent, tiling.rows, 64, 128) + selection.CONSUMER_OVERHEAD
    for resident, num_stages, rope_stages, pieces in product((2, 1), (3, 2), (4, 3, 2), (16, 12, 8, 6, 4, 3, 2)):
        wideners = 1 if resident == 2 else 2
        used = selection.swap_ab_ws_shared_memory(tiling, rope, shape.kv_lora_rank, num_stages, rope_stages)
        used += ring_bytes(shape, pieces)
        registers = registers_of(needed, 2 + wideners, wideners, resident, LOADING_REGISTERS[resident])
        in_flight = resident * min(pieces, 4 * rope_stages // rope.chunks_per_block)
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, -min(8, in_flight), -resident, -in_flight, -num_stages, used),
            limit, "codes_ws", tiling, used,
            f"{wideners} warpgroup(s) dequantise, {num_stages} latent and {rope_stages} rope stages, {pieces} pieces of"
            f" {PIECE} coded rows, {resident} CTA(s) a multiprocessor",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (2 + wideners), ctas_per_sm=resident,
            registers=registers, code_stages=pieces,
        )  # fmt: skip


def cluster_choices(shape: CodedShape, tiling: RowTiling, limit: int) -> Candidates:
    """For wider latents, of which each CTA of two has a half; a ring of two tiles, or one and a half."""
    cut = selection.halve(tiling, shape.kv_lora_rank, shape.qk_rope_head_dim, "narrow")  # wide pieces: not tried
    wide = shape.kv_lora_rank > selection.WIDE_LATENT and shape.kv_lora_rank == selection.CLUSTER * cut.columns
    if not wide or cut.rope_columns > selection.MAX_ROPE_HALF:
        return
    scores = 64 * tiling.rows // 128
    needed = selection.accumulators(cut.columns, tiling.rows, 64, 128) + scores + selection.CONSUMER_OVERHEAD
    registers = registers_of(needed, 4, 2, 1, LOADING_REGISTERS[1])
    for halves, rope_stages, pieces in product((4, 3), (4, 3, 2), (8, 6, 4, 3, 2)):
        num_stages = halves * cut.units // 2
        used = selection.cluster_shared_memory(tiling, cut, num_stages, rope_stages)
        used += ring_bytes(shape, pieces)
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, -min(3, pieces), -halves, -pieces, -rope_stages),
            limit, "codes_cluster", tiling, used,
            f"{selection.CLUSTER} x {cut.columns} columns, 2 warpgroups dequantise, {num_stages} parts of {cut.unit}"
            f" columns, {rope_stages} rope stages, {pieces} pieces of {PIECE} coded rows",
            num_stages=num_stages, rope_stages=rope_stages, threads=512, cluster_size=selection.CLUSTER,
            variant="narrow", registers=registers, code_stages=pieces,
        )  # fmt: skip


def latent_ws_choices(shape: CodedShape, tiling: RowTiling, limit: int) -> Candidates:
    """:func:`ws_choices` with warpgroups that make keys, which leave fewer registers: few tiles first, then tiles
    in flight, then two CTAs or two warpgroups that dequantise, then dequantised tiles."""
    latent = selection.padded_latent_columns(shape.kv_lora_rank, 128)
    blocks = selection.key_blocks(tiling, shape.qk_rope_head_dim)
    makers = blocks.chunks_per_block
    if shape.kv_lora_rank > selection.WIDE_LATENT:
        return
    needed = selection.accumulators(latent, tiling.rows, 64, 128) + selection.CONSUMER_OVERHEAD
    sizes = product(((2, 1), (1, 2), (1, 1)), (4, 3, 2), (3 * makers, 2 * makers), (16, 12, 8, 6, 4, 3, 2))
    for (resident, wideners), num_stages, rope_stages, pieces in sizes:
        used = selection.swap_ab_ws_shared_memory(tiling, blocks, shape.kv_lora_rank, num_stages, rope_stages)
        used += ring_bytes(shape, pieces)
        registers = key_registers(needed, shape.kv_lora_rank, makers, wideners, resident)
        ctas, in_flight = (-resident * wideners, -resident), resident * pieces
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, -min(8, in_flight), *ctas, -num_stages, -in_flight, used),
            limit, "codes_latent_ws", tiling, used,
            f"{makers} warpgroup(s) make keys, {wideners} dequantise, {num_stages} latent and {rope_stages} rope"
            f" stages, {pieces} pieces of {PIECE} coded rows, {resident} CTA(s) a multiprocessor",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (2 + makers + wideners),
            ctas_per_sm=resident, registers=registers, code_stages=pieces,
        )  # fmt: skip


def latent_cluster_choices(shape: CodedShape, tiling: RowTiling, limit: int) -> Candidates:
    """Behind :func:`latent_ws_choices` where that takes as few tiles; a ring of two tiles, or one and a half."""
    cut, makers = selection.halve(tiling, shape.kv_lora_rank, 8), -(-shape.qk_rope_head_dim // selection.KEY_TILE)
    needed = selection.accumulators(cut.columns, tiling.rows, 64, 128) + 64 * tiling.rows // 128
    registers = key_registers(needed + selection.CONSUMER_OVERHEAD, cut.columns, makers, 1, 1)
    for halves, rope_stages, pieces in product((4, 3), (3 * makers, 2 * makers), (8, 6, 4, 3, 2)):
        num_stages = max(cut.units + 1, halves * cut.units // 2)
        rope = (makers * selection.KEY_TILE, selection.KEY_TILE)
        used = selection.cluster_shared_memory(tiling, cut, num_stages, rope_stages, rope)
        used += ring_bytes(shape, pieces)
        yield candidate(
            (0, tiling.num_tiles, tiling.rows, 0, 0, -min(3, pieces), -halves, -pieces, -rope_stages),
            limit, "codes_latent_cluster", tiling, used,
            f"{selection.CLUSTER} x {cut.columns} columns, {makers} warpgroup(s) make keys, 1 dequantises, {num_stages}"
            f" parts of {cut.unit} columns, {rope_stages} rope stages, {pieces} pieces of {PIECE} coded rows",
            num_stages=num_stages, rope_stages=rope_stages, threads=128 * (3 + makers), cluster_size=selection.CLUSTER,
            registers=registers, code_stages=pieces,
        )  # fmt: skip


def _candidates(shape: CodedShape, capability: int, limit: int, has_rope_cache: bool) -> Candidates:
    if not has_rope_cache and capability != HOPPER:
        raise ValueError(f"the GPU has compute capability {capability / 10}; kernels that make keys of codes need 9.0")
    for tiling in selection.tilings(shape, (32, 16), has_rope_cache):
        if not has_rope_cache:
            yield from latent_ws_choices(shape, tiling, limit)
            yield from latent_cluster_choices(shape, tiling, limit)
            continue
        if capability == HOPPER:
            yield from ws_choices(shape, tiling, limit)
            yield from cluster_choices(shape, tiling, limit)
        yield from selection.portable_choices(shape, tiling, capability, limit, "codes_portable")


def list_kernels(shape: CodedShape, capability: int, *, has_rope_cache: bool = True) -> list[KernelChoice]:
    """Every configuration that fits the device, the one that the rule would choose first. Raises ValueError as
    :func:`mha2mla.kernels.mla_decode.selection.list_kernels`."""
    limit = shared_memory_limit(capability)
    return rank_choices(shape, capability, _candidates(shape, capability, limit, has_rope_cache))


@lru_cache(maxsize=4096)
def select_kernel(shape: CodedShape, capability: int, *, has_rope_cache: bool = True) -> KernelChoice:
    """The kernel and tiles for ``shape``; arguments and errors as :func:`list_kernels`."""
    return list_kernels(shape, capability, has_rope_cache=has_rope_cache)[0]
