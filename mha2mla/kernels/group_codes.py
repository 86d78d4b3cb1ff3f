"""Integer codes of rows: each group of elements has a scale and an offset. Plain torch, any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_SCALE_BITS = (8, 16)
_PLANES = (8, 4, 2, 1)  # bits of a code are stored in planes of these widths, so that no code crosses a byte


@dataclass(frozen=True)
class GroupQuantizer:
    """Asymmetric integer codes: a group of elements has one scale and one offset, from its minimum and maximum.

    A row is coded by itself, from its float32 values, to the nearest code: the same bytes in any batch, in any order.
    A coded row is bytes: scales and offsets of its groups, then the codes group by group. A NaN or an infinity makes
    its group NaN and touches no other.

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

    def encode(self, rows: Tensor) -> Tensor:
        """``rows`` [..., width] of any floating dtype as uint8 [..., bytes_per_row(width)]."""
        width = rows.shape[-1]
        group, count = self._groups(width)
        padded = rows.float()
        if padding := group * count - width:  # by the last element, which leaves minimum and maximum alone
            padded = torch.cat((padded, padded[..., -1:].expand(*padded.shape[:-1], padding)), -1)
        groups = padded.unflatten(-1, (count, group))
        stored = self._stored_scales(*groups.aminmax(dim=-1))
        offset, scale = self._scales(stored, count)
        codes = torch.where(scale > 0, (groups - offset) / scale, 0.0).round().clamp(0, 2**self.bits - 1)
        codes = codes.to(torch.uint8)
        packed = [_pack(codes >> shift & (1 << plane) - 1, plane) for plane, shift in self._planes()]
        return torch.cat((stored, torch.cat(packed, -1).flatten(-2)), -1)

    def decode(self, coded: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows [..., width] in ``dtype``, rounded once from float32, of what :meth:`encode` gave."""
        group, count = self._groups(width)
        stored, codes = coded.tensor_split((self._scale_bytes(count),), -1)
        offset, scale = self._scales(stored, count)
        planes = codes.unflatten(-1, (count, -1)).split([_plane_bytes(group, each) for each, _ in self._planes()], -1)
        values = sum(
            _unpack(packed, plane, group) << shift
            for packed, (plane, shift) in zip(planes, self._planes(), strict=True)
        )
        return (values.float() * scale + offset).flatten(-2)[..., :width].to(dtype)

    def round(self, rows: Tensor) -> Tensor:
        """``rows`` [..., width] as their codes give them back, in the same dtype."""
        return self.decode(self.encode(rows), rows.shape[-1], rows.dtype)

    def _groups(self, width: int) -> tuple[int, int]:
        """Elements of a group, and groups of a row."""
        group = self.group or width
        return group, -(-width // group)

    def _planes(self) -> Iterator[tuple[int, int]]:
        """Width and shift of each plane that a code is stored in: bits 0 and 1, then bit 2, of 3 bits."""
        shift = 0
        for plane in _PLANES:
            if self.bits & plane:
                yield plane, shift
                shift += plane

    def _scale_bytes(self, groups: int) -> int:
        return 4 * groups if self.scale_bits == 16 else 4 + 2 * groups

    def _stored_scales(self, least: Tensor, most: Tensor) -> Tensor:
        """Offsets, then scales of groups [..., groups] as uint8; where they have 8 bits, their units first."""
        levels = 2**self.bits - 1
        if self.scale_bits == 16:
            offset = least.half()
            scale = ((most - offset.float()) / levels).clamp(min=0).half()
            return torch.cat((offset, scale), -1).view(torch.uint8)
        unit = (least.abs().amax(-1, keepdim=True) / 127).bfloat16()
        steps = torch.where(unit > 0, (least / unit.float()).floor().clamp(-128, 127), 0.0)
        scale = ((most - steps * unit.float()) / levels).clamp(min=0)
        scale_unit = (scale.amax(-1, keepdim=True) / 254).bfloat16()  # not below 1/255 when it is rounded
        scale_steps = torch.where(scale_unit > 0, (scale / scale_unit.float()).ceil().clamp(0, 255), 0.0)
        units = torch.cat((unit, scale_unit), -1).view(torch.uint8)
        return torch.cat((units, steps.to(torch.int8).view(torch.uint8), scale_steps.to(torch.uint8)), -1)

    def _scales(self, stored: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Offset and scale [..., groups, 1] in float32."""
        if self.scale_bits == 16:
            both = stored.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
            offset, scale = both.chunk(2, -1)
        else:
            units, steps, scale_steps = stored.split((4, groups, groups), -1)
            units = units.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
            steps = steps.clone(memory_format=torch.contiguous_format).view(torch.int8).float()
            offset, scale = steps * units[..., :1], scale_steps.float() * units[..., 1:]
        return offset[..., None], scale[..., None]


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
