"""Integer codes of rows, and paged caches of them: each row has one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.geometry import CODE_BLOCK, SCALE_BYTES, code_bytes
from mha2mla.kernels.ops import argument_error, register, register_kernel, runs_compiled
from mha2mla.kernels.rope_append.api import write_rows
from mha2mla.kernels.row_codes.trellis import CHAIN, CURVES, Trellis

PLANES = (8, 4, 2, 1)  # bits of a code are stored in planes of these widths, so that no code crosses a byte
# Steps, in standard deviations, that lose least of normally distributed elements when codes of so many bits are evenly
# spaced (J. Max, "Quantizing for minimum distortion", 1960, table II).
STEPS = {5: 0.1881, 6: 0.1041, 7: 0.0568, 8: 0.0308}


@dataclass(frozen=True)
class RowQuantizer:
    """Integer codes of rows: a code stands for a level times the row's scale.

    Up to 4 bits, levels are those of a :class:`~mha2mla.kernels.row_codes.trellis.Trellis`; from 5 bits on, code k of
    2^bits is the level k - (2^bits - 1) / 2.

    A random rotation makes the elements of any row nearly normally distributed. So one scale does for all, and codes
    are found by the step that loses least of such elements, a number of their root mean squares; elements beyond the
    last level become that level. (A row whose largest element is nearer has a smaller step, where levels are evenly
    spaced.) Codes by that step alone are shorter than their row by its relative error: 3 % in 3 bits, for all tokens
    alike, which attention does not average out. The stored scale makes up for it: what a row gives back has the row's
    length along it (as in RaBitQ, arXiv 2405.12497), and what is left of the error is across. Up to 4 bits the scale
    is rounded to 8 significant bits, so that a level times a scale is exact in float32, and in one fused product and
    sum of bfloat16.

    A row is coded by itself, from its float32 values: the same bytes in any batch, in any order. A coded row is bytes:
    the scale in float32, then the codes in blocks of 32 elements, of which the runs of 8 elements h and h + 2 are a
    chain, even elements of a run before odd ones. A NaN or an infinity makes its row NaN and touches no other; from
    1e38 on a finite row may give back infinities.

    With ``centers`` [2, width], codes are of a row's difference from the nearer one; the sign of the scale says which:
    negative for the second.

    Args:
        bits: of a code, 1 to 8.

    Raises:
        ValueError: a value outside these.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in CURVES and self.bits not in STEPS:
            raise ValueError(f"bits is {self.bits}; expected 1 to 8")

    @property
    def middle(self) -> float:
        """Code of zero: half of the last code; half of the last level's number for a trellis."""
        return (2**self.bits - 1) / 2 if self.trellis is None else self.trellis.middle

    @property
    def unit(self) -> float:
        """Distance of two levels, in root mean squares of a row."""
        return STEPS[self.bits] if self.trellis is None else self.trellis.unit

    @property
    def trellis(self) -> Trellis | None:
        """Up to 4 bits: what codes stand for."""
        return Trellis(self.bits) if self.bits in CURVES else None

    def bytes_per_row(self, width: int) -> int:
        """Bytes of a coded row of ``width`` elements: its scale, and codes with their padding."""
        return code_bytes(width, self.bits)

    def encode(self, rows: Tensor, centers: Tensor | None = None, *, backend: str | None = None) -> Tensor:
        """``rows`` [..., width] of any floating dtype as uint8 [..., bytes_per_row(width)]. ``backend``: of the search
        up to 4 bits, "tilelang" or "reference"; None: TileLang on CUDA."""
        codes, _, scale, is_second = _find_codes(rows, centers, self.bits, runs_compiled(backend, rows.device))
        packed = [_pack(codes >> shift & (1 << plane) - 1, plane) for plane, shift in self.planes]
        stored = torch.where(is_second, -scale, scale)
        return torch.cat((stored.view(torch.uint8), torch.cat(packed, -1).flatten(-2)), -1)

    def decode(
        self, coded: Tensor, width: int, dtype: torch.dtype = torch.float32, centers: Tensor | None = None
    ) -> Tensor:
        """Rows [..., width] in ``dtype``, rounded once from float32, of what :meth:`encode` gave."""
        stored, codes = coded.tensor_split((SCALE_BYTES,), -1)
        scale = stored.clone(memory_format=torch.contiguous_format).view(torch.float32)
        sizes = [CODE_BLOCK * plane // 8 for plane, _ in self.planes]
        packed = codes.unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        values = sum(_unpack(part, plane) << shift for part, (plane, shift) in zip(packed, self.planes, strict=True))
        levels = _from_chains(_levels(values.unflatten(-1, (-1, CHAIN)), self.bits), width)
        return _rows(levels, scale.abs(), scale.signbit(), centers, dtype)

    def round(self, rows: Tensor, centers: Tensor | None = None, *, backend: str | None = None) -> Tensor:
        """``rows`` [..., width] as their codes give them back, in the same dtype. ``backend``: as of :meth:`encode`."""
        _, *found = _find_codes(rows, centers, self.bits, runs_compiled(backend, rows.device))
        return _rows(*found, centers, rows.dtype)

    @property
    def planes(self) -> list[tuple[int, int]]:
        """Width and shift of each plane that a code is stored in: bits 0 and 1, then bit 2, of 3 bits."""
        found, shift = [], 0
        for plane in PLANES:
            if self.bits & plane:
                found.append((plane, shift))
                shift += plane
        return found


def _rows(levels: Tensor, scale: Tensor, is_second: Tensor, centers: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] in ``dtype``, of their levels, scales and centers."""
    rows = levels * scale
    if centers is not None:
        rows = rows + centers.float()[is_second[..., 0].long()]
    return rows.to(dtype)


def _levels_of(chains: Tensor, bits: int) -> Tensor:
    """Levels [..., 16], float32, of codes [..., 16] of chains."""
    quantizer, chains = RowQuantizer(bits), chains.contiguous()  # the layout that is promised
    return chains.float() - quantizer.middle if quantizer.trellis is None else quantizer.trellis.decode(chains)


_levels = register(
    "levels_of_codes(Tensor chains, int bits) -> Tensor",
    _levels_of,
    lambda chains, bits: chains.new_empty(chains.shape, dtype=torch.float32),
)


_codes_of = register_kernel(
    "codes_of_chains(Tensor chains, int bits, bool compiled) -> Tensor",
    lambda chains, bits: Trellis(bits).find_codes(chains),
    lambda chains, bits: chains.new_empty(chains.shape, dtype=torch.uint8),
    "mha2mla.kernels.row_codes.kernel:launch_find_codes",
)


@torch.no_grad()
def _found_codes(
    rows: Tensor, centers: Tensor | None, bits: int, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [..., blocks, 32], uint8, by chains, of rows [..., width]; their levels [..., width] and scales [..., 1],
    float32; and which are coded from the second center [..., 1]. Products are exact in float64: their sums, rounded
    to float32, hardly depend on the order."""
    quantizer, width = RowQuantizer(bits), rows.shape[-1]
    trellis, middle = quantizer.trellis, quantizer.middle
    rows = rows.float().contiguous()  # the layout that is promised
    is_second = torch.zeros_like(rows[..., :1], dtype=torch.bool)
    if centers is not None:
        first, second = (rows - center for center in centers.float())
        is_second = _energy(second) < _energy(first)
        rows = torch.where(is_second, second, first)
    energy = _energy(rows)
    step = (energy / width).sqrt() * quantizer.unit
    if trellis is None:
        step = torch.minimum(step, rows.abs().amax(-1, keepdim=True).double() / middle)
    step = step.float()
    is_number, has_codes = step.isfinite(), step.isfinite() & (step > 0)
    chains = _to_chains(torch.where(has_codes, rows / step, 0.0))
    if trellis is None:
        codes = (chains + middle).round().clamp(0, 2**bits - 1).to(torch.uint8)
    else:
        codes = _codes_of(chains.reshape(-1, CHAIN), bits, compiled).view(chains.shape)
    codes = torch.where(has_codes[..., None, None], codes, 0)
    levels = _from_chains(_levels_of(codes, bits), width)
    along = rows.double().mul_(levels).sum(-1, keepdim=True)
    scale = torch.where(step == 0, 0.0, energy / along).float()
    if trellis is not None:
        scale = scale.bfloat16().float()
    return codes.flatten(-2), levels, torch.where(is_number, scale, torch.nan), is_second


def _empty_codes(rows: Tensor, _: Tensor | None, bits: int, compiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = -(-rows.shape[-1] // CODE_BLOCK)
    scale = rows.new_empty(*rows.shape[:-1], 1, dtype=torch.float32)
    codes = rows.new_empty(*rows.shape[:-1], blocks, CODE_BLOCK, dtype=torch.uint8)
    return codes, rows.new_empty(rows.shape, dtype=torch.float32), scale, scale.new_empty(scale.shape, dtype=torch.bool)


# An op, so that torch.compile leaves it as it is: of these reductions Inductor makes one Triton kernel, which writes
# rows and reads them again. Triton 3.6 lets other threads read than wrote, without a barrier between them
# (github.com/triton-lang/triton/issues/10924): now and then codes were those of what the memory had held before.
_find_codes = register(
    "find_codes(Tensor rows, Tensor? centers, int bits, bool compiled) -> (Tensor, Tensor, Tensor, Tensor)",
    _found_codes,
    _empty_codes,
)


def _energy(rows: Tensor) -> Tensor:
    """[..., 1], float64: the sum of squares of rows [..., width], float32."""
    return rows.double().square_().sum(-1, keepdim=True)


def _to_chains(rows: Tensor) -> Tensor:
    """Rows [..., width] as [..., blocks, 2, 16]: padded with zeros, chain h has runs h and h + 2 of 8 elements."""
    blocks = F.pad(rows, (0, -rows.shape[-1] % CODE_BLOCK)).unflatten(-1, (-1, 2, 2, 4, 2))  # run 2 u + h, pair, place
    return blocks.transpose(-4, -3).transpose(-2, -1).flatten(-3)


def _from_chains(chains: Tensor, width: int) -> Tensor:
    """The inverse of :func:`_to_chains`."""
    blocks = chains.unflatten(-1, (2, 2, 4))
    return blocks.transpose(-4, -3).transpose(-2, -1).flatten(-5)[..., :width].contiguous()


def _pack(values: Tensor, plane: int) -> Tensor:
    """Values [..., 32] below 2^plane, by chains, as bytes. In planes of 8 bits each is a byte. Else runs of 8 values
    share a word, a nibble each: run r has word r % plane, and bits plane * (r // plane) of the nibbles on."""
    if plane == 8:
        return values
    shifts = _shifts(plane, values.device)
    shifted = values.unflatten(-1, (len(shifts), plane, 4, 2)) << shifts
    return shifted.sum((-4, -1), dtype=torch.uint8).flatten(-2)


def _unpack(packed: Tensor, plane: int) -> Tensor:
    """The inverse of :func:`_pack`."""
    if plane == 8:
        return packed
    shifts = _shifts(plane, packed.device).movedim(-1, 0).flatten(2)  # [2, 4 / plane, 1]: bytes stay side by side
    nibbles = packed[..., None, None, :] >> shifts & (1 << plane) - 1
    return nibbles.unflatten(-1, (plane, 4)).movedim(-4, -1).flatten(-4)


def _shifts(plane: int, device: torch.device) -> Tensor:
    """[4 / plane, 1, 1, 2], uint8: of the runs that share a word, and of the two nibbles of a byte."""
    runs = torch.arange(0, 4, plane, dtype=torch.uint8, device=device)[:, None, None, None]
    return runs + torch.arange(0, 8, 4, dtype=torch.uint8, device=device)


def append_codes(
    latent: Tensor,
    latent_cache: Tensor,
    slots: Tensor,
    quantizer: RowQuantizer,
    centers: Tensor | None,
    *,
    backend: str | None = None,
) -> None:
    """Writes the codes of new rows into a paged cache.

    Args:
        latent: [N, d_c].
        latent_cache: [P, page, bytes of a row] uint8, written; rows of a page side by side.
        slots: [N] int32; as in :func:`mha2mla.kernels.mla_append`.
        centers: [2, d_c], or None.
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16, where
            d_c is a multiple of 32.

    Raises:
        ValueError: naming the argument, what it was and what it must be.
    """
    if latent.dim() != 2 or not latent.is_floating_point():
        raise argument_error("latent", f"{latent.dtype} {tuple(latent.shape)}", "floating-point numbers [N, d_c]")
    _check_cache(latent_cache, latent.shape[1], quantizer, centers)
    if slots.dtype != torch.int32 or slots.shape != latent.shape[:1]:
        raise argument_error("slots", f"{slots.dtype} {tuple(slots.shape)}", f"torch.int32 {tuple(latent.shape[:1])}")
    compiled = _runs_compiled(backend, latent.shape[1], latent_cache, latent.dtype)
    _append_codes(latent, latent_cache, slots, centers, quantizer.bits, compiled)


def read_codes(
    latent_cache: Tensor,
    block_table: Tensor,
    width: int,
    quantizer: RowQuantizer,
    centers: Tensor | None,
    dtype: torch.dtype,
    *,
    backend: str | None = None,
) -> Tensor:
    """Pages of a ``block_table`` [B, max_pages] with their rows dequantised: [B * max_pages, page, width].

    An entry that is no page, such as -1, gives a page that holds anything. ``backend`` and errors: as of
    :func:`append_codes`.
    """
    _check_cache(latent_cache, width, quantizer, centers)
    if block_table.dtype != torch.int32 or block_table.dim() != 2:
        was = f"{block_table.dtype} {tuple(block_table.shape)}"
        raise argument_error("block_table", was, "torch.int32 [B, max_pages]")
    compiled = _runs_compiled(backend, width, latent_cache, dtype)
    return _read_codes(latent_cache, block_table, centers, width, quantizer.bits, dtype, compiled)


def _check_cache(latent_cache: Tensor, width: int, quantizer: RowQuantizer, centers: Tensor | None) -> None:
    row = quantizer.bytes_per_row(width)
    if latent_cache.dtype != torch.uint8 or latent_cache.dim() != 3 or latent_cache.shape[2] != row:
        was = f"{latent_cache.dtype} {tuple(latent_cache.shape)}"
        expected = f"torch.uint8 [P, page, {row}], of {width} codes of {quantizer.bits} bits"
        raise argument_error("latent_cache", was, expected)
    if centers is not None and (centers.shape != (2, width) or not centers.is_floating_point()):
        was = f"{centers.dtype} {tuple(centers.shape)}"
        raise argument_error("centers", was, f"None, or floating-point numbers {(2, width)}")


def _runs_compiled(backend: str | None, width: int, latent_cache: Tensor, dtype: torch.dtype) -> bool:
    """True where the kernels serve a cache: rows of whole blocks, which are read by words."""
    if not runs_compiled(backend, latent_cache.device, dtype) or width % CODE_BLOCK:
        return False
    page, *rows = latent_cache.stride()
    return rows == [latent_cache.shape[2], 1] and (page | latent_cache.data_ptr()) % SCALE_BYTES == 0


def _pages_of(
    latent_cache: Tensor, block_table: Tensor, centers: Tensor | None, width: int, bits: int, dtype: torch.dtype
) -> Tensor:
    pages, page_size, _ = latent_cache.shape
    if pages == 0:  # no entry is a page
        return latent_cache.new_zeros(block_table.numel(), page_size, width, dtype=dtype)
    read = latent_cache[block_table.flatten().clamp(0, pages - 1).long()]
    return RowQuantizer(bits).decode(read, width, dtype, centers)


_append_codes = register_kernel(
    "append_codes(Tensor latent, Tensor(a!) latent_cache, Tensor slots, Tensor? centers, int bits, bool compiled)"
    " -> ()",
    lambda latent, latent_cache, slots, centers, bits: write_rows(
        ((latent_cache, RowQuantizer(bits).encode(latent, centers, backend="reference")),), slots
    ),
    lambda *_: None,
    "mha2mla.kernels.row_codes.kernel:launch_append_codes",
)
_read_codes = register_kernel(
    "read_codes(Tensor latent_cache, Tensor block_table, Tensor? centers, int width, int bits, ScalarType dtype,"
    " bool compiled) -> Tensor",
    _pages_of,
    lambda latent_cache, block_table, centers, width, bits, dtype: latent_cache.new_empty(
        block_table.numel(), latent_cache.shape[1], width, dtype=dtype
    ),
    "mha2mla.kernels.row_codes.kernel:launch_read_codes",
)
