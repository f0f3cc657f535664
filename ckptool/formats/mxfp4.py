"""Weights in MXFP4, as gpt-oss stores its experts: `X_blocks` (two 4-bit floats a byte) and `X_scales`.

Every 32 numbers share a scale, a power of two: the OCP Microscaling Formats (MX) Specification v1.0, 5.3.3 (E2M1) and
5.4.1 (E8M0), https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf. The low half of a
byte comes first. Stored are (experts, outputs, inputs / 32, 16) bytes; the weight X is (experts, inputs, outputs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box
from ckptool.core.recipes import Found, ReadPart
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES_PER_BLOCK = 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_EXPONENT_BIAS, _NAN_EXPONENT = 127, 255

#: Bytes unpacked at once, so that memory stays small.
_STRIP_BYTES = 1 << 19


@dataclass(frozen=True)
class PackedExperts:
    """One weight of all experts of a layer."""

    blocks: TensorEntry
    scales: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, num_blocks, _ = self.blocks.shape
        return (experts, num_blocks * 2 * _BYTES_PER_BLOCK, outputs)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.blocks.fqn, self.scales.fqn)

    def fill(self, read: ReadPart, box: Box, out: Tensor) -> None:
        """Put the weights of the experts in `box` into `out`."""
        import torch

        _, outputs, num_blocks, _ = self.blocks.shape
        values = torch.tensor(_VALUES)
        factors = torch.tensor([2.0 ** (i - _EXPONENT_BIAS) for i in range(_NAN_EXPONENT)] + [math.nan])
        strip = max(1, _STRIP_BYTES // max(1, num_blocks * _BYTES_PER_BLOCK))
        for expert in range(box.offsets[0], box.ends[0]):
            for first in range(0, outputs, strip):
                count = min(strip, outputs - first)
                blocks = read(self.blocks.fqn, Box((expert, first, 0, 0), (1, count, *self.blocks.shape[2:])))[0]
                scales = read(self.scales.fqn, Box((expert, first, 0), (1, count, num_blocks)))[0]
                halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1)
                numbers = values[halves.int()].flatten(-2) * factors[scales.int()].unsqueeze(-1)
                out[expert - box.offsets[0], :, first : first + count] = numbers.flatten(-2).t()


def find_packed(tensors: Mapping[str, TensorEntry]) -> Found:
    """The weights that are stored packed. Raises DamagedError for blocks without scales, or scales that don't fit."""
    recipes: dict[str, Any] = {}
    scales_left = {name for name in tensors if name.endswith(_SCALES)}
    for name, blocks in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        weight = name.removesuffix(_BLOCKS)
        scales = tensors.get(weight + _SCALES)
        fits = (
            scales is not None
            and (blocks.dtype, scales.dtype) == ("uint8", "uint8")
            and len(blocks.shape) == 4
            and blocks.shape[-1] == _BYTES_PER_BLOCK
            and scales.shape == blocks.shape[:-1]
        )
        if scales is None or not fits:
            raise DamagedError(f"{name} of shape {list(blocks.shape)} has no {weight}{_SCALES} that fits it")
        if weight in tensors:
            raise DamagedError(f"{weight} is stored both packed and unpacked")
        scales_left.remove(scales.fqn)
        recipes[weight] = PackedExperts(blocks, scales)
    if scales_left:
        raise DamagedError(f"{min(scales_left)} scales blocks that are not there")
    return Found(recipes)
