"""Numbers as 8-bit codes with a scale for each block of 256: block-wise dynamic quantisation.

Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, ICLR 2022,
https://arxiv.org/abs/2110.02861. Blocks lie in one row of a tensor each, so that rows are sharded with their scales.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

#: Elements of a row that share a scale. The last block of a row may be shorter.
BLOCK_SIZE = 256

#: Powers of ten below 1 that a code reaches.
_NUM_DECADES = 7


@dataclass(frozen=True)
class DynamicCode:
    """Which fraction of its block's scale each code stands for: `levels` (256,), rising; that of the code `zero` is 0.

    A fraction gets the first code whose border in `borders` (255,) is not below it, or else the last.
    """

    levels: torch.Tensor
    borders: torch.Tensor
    zero: int

    @classmethod
    @functools.cache
    def signed(cls, device: torch.device) -> DynamicCode:
        """For numbers of both signs."""
        above = _fractions(num_extra_bits=0)
        return cls._of([-fraction for fraction in above] + [0.0, *above, 1.0], device)

    @classmethod
    @functools.cache
    def unsigned(cls, device: torch.device) -> DynamicCode:
        """For squares. What is not 0 never gets the code of 0: a mean that is divided by it would be a leap (Li, Chen
        and Zhu, Memory Efficient Optimizers with 4-bit States, 2023, https://arxiv.org/abs/2309.01507)."""
        code = cls._of([0.0, *_fractions(num_extra_bits=1), 1.0], device)
        code.borders[0] = 0.0
        return code

    @classmethod
    def _of(cls, levels: list[float], device: torch.device) -> DynamicCode:
        levels = sorted(levels)
        borders = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
        tensor = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        return cls(tensor(levels), tensor(borders), levels.index(0.0))

    def quantize(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (blocks, BLOCK_SIZE) uint8 and scales (blocks,) fp32 of what is nearest to `numbers`, fp32.

        A scale is the number of the largest magnitude in its block, sign and all: its fraction is 1, so it is kept, and
        what was dequantised and has not changed gets the same codes and scale again.
        """
        highest, lowest = numbers.amax(dim=1), numbers.amin(dim=1)
        scales = torch.where(highest >= -lowest, highest, lowest)
        fractions = numbers / torch.where(scales == 0, 1.0, scales)[:, None]
        return torch.bucketize(fractions, self.borders, out_int32=True).to(torch.uint8), scales

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The fp32 numbers (blocks, BLOCK_SIZE) that codes and scales stand for."""
        return self.levels[codes.int()].mul_(scales[:, None])


def _fractions(num_extra_bits: int) -> list[float]:
    """The paper's dynamic fractions: of each decade below 1 the middles of equal parts of its upper nine tenths, twice
    as many as of the decade below. Squares need no bit for a sign; it doubles all."""
    fractions = []
    for decade in range(_NUM_DECADES):
        parts = 1 << (decade + num_extra_bits)
        fractions += [(0.1 + 0.9 * (i + 0.5) / parts) / 10 ** (_NUM_DECADES - 1 - decade) for i in range(parts)]
    return fractions


def num_blocks(num_columns: int) -> int:
    """Blocks, and so scales, of a row."""
    return math.ceil(num_columns / BLOCK_SIZE)
