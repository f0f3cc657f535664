"""The digest of a part of a tensor, computed where the tensor lies.

The sum is that of `storage.digest`. On a GPU it is taken there, so that a byte which changes on its way to the disk is
seen later on. torch's int64 arithmetic wraps around, as the sum's modulo 2**64 wants it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.storage.digest import BLOCK_WORDS, WORD_BYTES, TensorDigest, digest_run, inner_factors, outer_factor

if TYPE_CHECKING:
    import torch

_PIECE_UNITS = 1 << 20
_MASK = (1 << 64) - 1


def digest_tensor(part: torch.Tensor, box: Box, shape: tuple[int, ...]) -> TensorDigest:
    """The digest of `part`, a tensor on any device, as the region `box` of a tensor of `shape`."""
    import torch

    part = part.detach()
    if part.numel() == 0:
        return TensorDigest()
    if part.device.type == "cpu" and box.is_contiguous_in(shape):
        raw = part.contiguous().reshape(-1).view(torch.uint8).numpy()
        return digest_run(raw.data, box.flat_start(shape) * part.element_size())
    return sum_on_device(part, box, shape)


def sum_on_device(part: torch.Tensor, box: Box, shape: tuple[int, ...]) -> TensorDigest:
    """The same by torch operations alone, however many short runs of the whole tensor the box consists of.

    The part is cut into units of one size, at most a word, none of which crosses a word's border in the whole tensor.
    """
    import torch

    part = part.detach().contiguous()
    itemsize, device = part.element_size(), part.device
    outer_dims, run_elements, strides = _runs(box, shape)
    first = box.flat_start(shape)
    steps = [strides[d] * itemsize for d in outer_dims if box.sizes[d] > 1]
    # torch views memory as wider integers only from a multiple of their size on.
    unit_bytes = math.gcd(
        WORD_BYTES, run_elements * itemsize, first * itemsize, part.storage_offset() * itemsize, *steps
    )
    units_per_word = WORD_BYTES // unit_bytes
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit_bytes]
    units = part.reshape(-1).view(torch.uint8).view(integers)
    starts = torch.full((1,), first, dtype=torch.int64, device=device)
    for d in outer_dims:
        steps_of_dim = torch.arange(box.sizes[d], device=device) * strides[d]
        starts = (starts[:, None] + steps_of_dim).reshape(-1)
    starts = starts * itemsize // unit_bytes
    run_units = run_elements * itemsize // unit_bytes
    last = Box(tuple(end - 1 for end in box.ends), (1,) * len(shape)).flat_start(shape)
    first_block = first * itemsize // WORD_BYTES // BLOCK_WORDS
    num_blocks = ((last + 1) * itemsize - 1) // WORD_BYTES // BLOCK_WORDS - first_block + 1
    outer = [_outer_table(lane, first_block, num_blocks, device) for lane in range(2)]

    lanes = torch.zeros(2, dtype=torch.int64, device=device)
    for begin in range(0, len(units), _PIECE_UNITS):
        piece = units[begin : begin + _PIECE_UNITS]
        index = torch.arange(begin, begin + len(piece), device=device)
        position = starts[index // run_units] + index % run_units
        values = piece.to(torch.int64)
        if unit_bytes < WORD_BYTES:
            values &= (1 << (8 * unit_bytes)) - 1
            values <<= position % units_per_word * (8 * unit_bytes)
        word = position // units_per_word
        column, block = word % BLOCK_WORDS, word // BLOCK_WORDS - first_block
        for lane in range(2):
            lanes[lane] += (values * _inner_table(lane, device)[column] * outer[lane][block]).sum()
    one, two = lanes.tolist()
    return TensorDigest((one & _MASK, two & _MASK))


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[range, int, list[int]]:
    """The box as contiguous runs of the whole tensor: the dims that count the runs, the elements of each, and the
    whole tensor's strides in elements."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    varying = [d for d, (size, n) in enumerate(zip(box.sizes, shape, strict=True)) if size != n]
    split = varying[-1] if varying else 0
    return range(split), math.prod(box.sizes[split:]), strides


@functools.cache
def _inner_table(lane: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(inner_factors(lane).view("<i8")).to(device)


def _outer_table(lane: int, first_block: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    import numpy as np
    import torch

    factors = [outer_factor(lane, first_block + i) for i in range(num_blocks)]
    return torch.from_numpy(np.array(factors, dtype="<u8").view("<i8")).to(device)
