"""Rounding of numbers to integer codes in groups, and the bits that codes, scales and offsets take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE_BITS = (8, 16)


@dataclass(frozen=True)
class GroupQuantizer:
    """Asymmetric integer codes: a group of numbers has one scale and one offset, both from its minimum and maximum.

    Args:
        bits: of a code, 1 to 8.
        group: numbers that share a scale and an offset; None: the whole row. A row that is no multiple of it is padded,
            and the padding is counted.
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

    def round(self, rows: Tensor) -> Tensor:
        """What codes of ``rows`` [..., width] give back: the same shape and dtype; computed in float32."""
        width = rows.shape[-1]
        group = width if self.group is None else self.group
        numbers = rows.float()
        if padding := -width % group:  # by the last number, which leaves minimum and maximum alone
            numbers = torch.cat((numbers, numbers[..., -1:].expand(*numbers.shape[:-1], padding)), -1)
        numbers = numbers.unflatten(-1, (-1, group))
        scale, offset = self._scale_and_offset(*numbers.aminmax(dim=-1, keepdim=True))
        levels = 2**self.bits - 1
        codes = torch.where(scale > 0, (numbers - offset) / scale, 0.0).round().clamp(0, levels)
        return (codes * scale + offset).flatten(-2)[..., :width].to(rows.dtype)

    def _scale_and_offset(self, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Of groups [..., groups, 1], rounded to what is stored."""
        levels = 2**self.bits - 1
        if self.scale_bits == 16:
            offset = least.half().float()
            return ((most - offset) / levels).clamp(min=0).half().float(), offset
        unit = (least.abs().amax(-2, keepdim=True) / 127).bfloat16().float()
        offset = torch.where(unit > 0, (least / unit).floor().clamp(-128, 127), 0.0) * unit
        scale = ((most - offset) / levels).clamp(min=0)
        unit = (scale.amax(-2, keepdim=True) / 254).bfloat16().float()  # not below 1/255 when it is rounded
        return torch.where(unit > 0, (scale / unit).ceil().clamp(0, 255), 0.0) * unit, offset

    def bits_per_row(self, width: int) -> int:
        """Of a row of ``width`` numbers: codes with their padding, scales and offsets."""
        group = width if self.group is None else self.group
        groups = -(-width // group)
        return groups * (group * self.bits + 2 * self.scale_bits) + (32 if self.scale_bits == 8 else 0)
