"""Integer codes of rows, and paged caches of them: each group of elements has a scale and an offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mha2mla.kernels.ops import register_kernel, runs_compiled
from mha2mla.kernels.rope_append.api import write_rows

_SCALE_BITS = (8, 16)
LARGEST_HALF = torch.finfo(torch.float16).max
PLANES = (8, 4, 2, 1)  # bits of a code are stored in planes of these widths, so that no code crosses a byte


@dataclass(frozen=True)
class GroupQuantizer:
    """Asymmetric integer codes: a group of elements has one scale and one offset, from its minimum and maximum.

    A row is coded by itself, from its float32 values, to the nearest code: the same bytes in any batch, in any order.
    A coded row is bytes: offsets and scales of its groups, then the codes group by group. A NaN or an infinity makes
    its group NaN and touches no other.

    With ``centers`` [2, width], codes are of a row's difference from the nearer one; the sign of its first scale (of
    the scales' unit, where scales have 8 bits) says which: negative for the second.

    Args:
        bits: of a code, 1 to 8.
        group: elements that share a scale and an offset; None: the whole row. A row that is no multiple of it is
            padded, and the padding is counted.
        scale_bits: of a scale, and of an offset: 16 (float16), or 8 (integers, in units of the row's largest, of which
            each row has two in bfloat16).

    Raises:
        ValueError: a value outside these.
    """

    bits: int
    group: int | None = 32
    scale_bits: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}; expected 1 to 8")
        if self.group is not None and self.group < 2:
            raise ValueError(f"group is {self.group}; expected at least 2, or None for a whole row")
        if self.scale_bits not in _SCALE_BITS:
            raise ValueError(f"scale_bits is {self.scale_bits}; expected one of {_SCALE_BITS}")

    def bytes_per_row(self, width: int) -> int:
        """Bytes of a coded row of ``width`` elements: codes with their padding, scales and offsets."""
        group, groups = self._groups(width)
        return self._scale_bytes(groups) + groups * sum(_plane_bytes(group, plane) for plane, _ in self._planes())

    def encode(self, rows: Tensor, centers: Tensor | None = None) -> Tensor:
        """``rows`` [..., width] of any floating dtype as uint8 [..., bytes_per_row(width)]."""
        width = rows.shape[-1]
        group, count = self._groups(width)
        padded, is_second = rows.float(), None
        if centers is not None:
            first, second = (padded - center for center in centers.float())
            # Squares of float32 are exact in float64: which is nearer does not depend on the order of the sums.
            is_second = second.double().square().sum(-1) < first.double().square().sum(-1)
            padded = torch.where(is_second[..., None], second, first)
        if padding := group * count - width:  # by the last element, which leaves minimum and maximum alone
            padded = torch.cat((padded, padded[..., -1:].expand(*padded.shape[:-1], padding)), -1)
        groups = padded.unflatten(-1, (count, group))
        stored = self._stored_scales(*groups.aminmax(dim=-1), is_second)
        offset, scale, _ = self._scales(stored, count)
        codes = torch.where(scale > 0, (groups - offset) / scale, 0.0).round().clamp(0, 2**self.bits - 1)
        codes = codes.to(torch.uint8)
        packed = [_pack(codes >> shift & (1 << plane) - 1, plane) for plane, shift in self._planes()]
        return torch.cat((stored, torch.cat(packed, -1).flatten(-2)), -1)

    def decode(
        self, coded: Tensor, width: int, dtype: torch.dtype = torch.float32, centers: Tensor | None = None
    ) -> Tensor:
        """Rows [..., width] in ``dtype``, rounded once from float32, of what :meth:`encode` gave."""
        group, count = self._groups(width)
        stored, codes = coded.tensor_split((self._scale_bytes(count),), -1)
        offset, scale, is_second = self._scales(stored, count)
        planes, sizes = list(self._planes()), [_plane_bytes(group, plane) for plane, _ in self._planes()]
        packed = codes.unflatten(-1, (count, -1)).split(sizes, -1)
        values = sum(_unpack(part, plane, group) << shift for part, (plane, shift) in zip(packed, planes, strict=True))
        rows = (values.float() * scale + offset).flatten(-2)[..., :width]
        if centers is not None:
            rows = rows + centers.float()[is_second.long()]
        return rows.to(dtype)

    def round(self, rows: Tensor, centers: Tensor | None = None) -> Tensor:
        """``rows`` [..., width] as their codes give them back, in the same dtype."""
        return self.decode(self.encode(rows, centers), rows.shape[-1], rows.dtype, centers)

    def _groups(self, width: int) -> tuple[int, int]:
        """Elements of a group, and groups of a row."""
        group = self.group or width
        return group, -(-width // group)

    def _planes(self) -> Iterator[tuple[int, int]]:
        """Width and shift of each plane that a code is stored in: bits 0 and 1, then bit 2, of 3 bits."""
        shift = 0
        for plane in PLANES:
            if self.bits & plane:
                yield plane, shift
                shift += plane

    def _scale_bytes(self, groups: int) -> int:
        return 4 * groups if self.scale_bits == 16 else 4 + 2 * groups

    def _stored_scales(self, least: Tensor, most: Tensor, is_second: Tensor | None) -> Tensor:
        """Offsets, then scales of groups [..., groups] as uint8; where they have 8 bits, their units first.

        ``is_second`` [...] makes the first scale, or their unit, negative.
        """
        sign = 1 if is_second is None else torch.where(is_second, -1, 1)[..., None]
        levels = 2**self.bits - 1
        if self.scale_bits == 16:
            offset = least.half()
            scale = ((most - offset.float()) / levels).clamp(min=0)
            scale = torch.where(scale.isfinite(), scale.clamp(max=LARGEST_HALF), scale).half()
            return torch.cat((offset, scale[..., :1] * sign, scale[..., 1:]), -1).view(torch.uint8)
        unit = (least.abs().amax(-1, keepdim=True) / 127).bfloat16()
        steps = torch.where(unit > 0, (least / unit.float()).floor().clamp(-128, 127), 0.0)
        scale = ((most - steps * unit.float()) / levels).clamp(min=0)
        scale_unit = (scale.amax(-1, keepdim=True) / 254).bfloat16()  # not below 1/255 when it is rounded
        scale_steps = torch.where(scale_unit > 0, (scale / scale_unit.float()).ceil().clamp(0, 255), 0.0)
        units = torch.cat((unit, scale_unit * sign), -1).view(torch.uint8)
        return torch.cat((units, steps.to(torch.int8).view(torch.uint8), scale_steps.to(torch.uint8)), -1)

    def _scales(self, stored: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Offset and scale [..., groups, 1] in float32, and whether a row is coded from the second center [...]."""
        if self.scale_bits == 16:
            both = stored.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
            offset, scale = both.chunk(2, -1)
            is_second = scale[..., 0].signbit()
        else:
            units, steps, scale_steps = stored.split((4, groups, groups), -1)
            units = units.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
            steps = steps.clone(memory_format=torch.contiguous_format).view(torch.int8).float()
            offset, scale = steps * units[..., :1], scale_steps.float() * units[..., 1:]
            is_second = units[..., 1].signbit()
        return offset[..., None], scale.abs()[..., None], is_second


def _plane_bytes(group: int, plane: int) -> int:
    return -(-group * plane // 8)


def _pack(values: Tensor, plane: int) -> Tensor:
    """Values [..., group] below 2^plane as bytes; byte j has elements j, j + bytes, … from its low bits."""
    per_byte, size = 8 // plane, _plane_bytes(values.shape[-1], plane)
    values = F.pad(values, (0, per_byte * size - values.shape[-1])).unflatten(-1, (per_byte, size))
    shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=values.device)[:, None]
    return (values << shifts).sum(-2, dtype=torch.uint8)


def _unpack(packed: Tensor, plane: int, group: int) -> Tensor:
    """The inverse of :func:`_pack`."""
    shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts & (1 << plane) - 1).flatten(-2)[..., :group]


def append_codes(
    latent: Tensor,
    latent_cache: Tensor,
    slots: Tensor,
    quantizer: GroupQuantizer,
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
        backend: "tilelang", "reference", or None: TileLang for CUDA tensors in float32, bfloat16 and float16, of whole
            groups whose scales have 16 bits.
    """
    compiled = _runs_compiled(backend, quantizer, latent.shape[1], latent_cache, latent.dtype)
    _append_codes(latent, latent_cache, slots, centers, quantizer.bits, quantizer.group, compiled)


def read_codes(
    latent_cache: Tensor,
    block_table: Tensor,
    width: int,
    quantizer: GroupQuantizer,
    centers: Tensor | None,
    dtype: torch.dtype,
    *,
    backend: str | None = None,
) -> Tensor:
    """Pages of a ``block_table`` [B, max_pages] with their rows dequantised: [B * max_pages, page, width].

    A page that the table lacks (-1) holds anything. ``backend``: as of :func:`append_codes`.
    """
    compiled = _runs_compiled(backend, quantizer, width, latent_cache, dtype)
    return _read_codes(latent_cache, block_table, centers, width, quantizer.bits, quantizer.group, dtype, compiled)


def _runs_compiled(
    backend: str | None, quantizer: GroupQuantizer, width: int, latent_cache: Tensor, dtype: torch.dtype
) -> bool:
    """True where the kernels serve a cache: rows of whole groups, which are read by words."""
    whole = quantizer.group in (32, 64) and width % quantizer.group == 0 and quantizer.scale_bits == 16
    page, *rows = latent_cache.stride()
    served = whole and rows == [latent_cache.shape[2], 1] and (page | latent_cache.data_ptr()) % 8 == 0
    return runs_compiled(backend, latent_cache.device, dtype) and served


_append_codes = register_kernel(
    "append_codes(Tensor latent, Tensor(a!) latent_cache, Tensor slots, Tensor? centers, int bits, int group,"
    " bool compiled) -> ()",
    lambda latent, latent_cache, slots, centers, bits, group: write_rows(
        ((latent_cache, GroupQuantizer(bits, group).encode(latent, centers)),), slots
    ),
    lambda *_: None,
    "mha2mla.kernels.group_codes.kernel:launch_append_codes",
)
_read_codes = register_kernel(
    "read_codes(Tensor latent_cache, Tensor block_table, Tensor? centers, int width, int bits, int group,"
    " ScalarType dtype, bool compiled) -> Tensor",
    lambda latent_cache, block_table, centers, width, bits, group, dtype: GroupQuantizer(bits, group).decode(
        latent_cache[block_table.flatten().clamp(min=0).long()], width, dtype, centers
    ),
    lambda latent_cache, block_table, centers, width, bits, group, dtype: latent_cache.new_empty(
        block_table.numel(), latent_cache.shape[1], width, dtype=dtype
    ),
    "mha2mla.kernels.group_codes.kernel:launch_read_codes",
)
