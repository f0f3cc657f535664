"""Weights stored as 8-bit floats with scales beside them: `X` and `X_scale_inv` (DeepSeek-V3), or `X` and `X_scale`.

A weight is its stored number times the scale of its block. The scales of a matrix are a grid, one for each block of
`weight_block_size` rows and columns (those at the edges may be smaller), or one for each row, or one for all. The name
`scale_inv` is DeepSeek's: the inverse of what the weight was divided by, so a factor all the same:
https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_dequant_kernel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box
from ckptool.core.recipes import Found, ReadPart
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, UnsupportedError, name_some

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
_SCALE_DTYPES = frozenset({"float32", "float16", "bfloat16", "float8_e8m0fnu"})

#: Scales of activations and of the key-value cache: no weights are made of them.
_ACTIVATION_SUFFIXES = ("activation_scale", "input_scale", "output_scale", ".k_scale", ".v_scale")

#: Names that can't be anything but a scale; others ending in `_scale` may be parameters of their own.
_SURE_SUFFIXES = ("_scale_inv", ".weight_scale")

#: Elements made at once, so that memory stays small whatever the size of a box.
_STRIP_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ScaledWeight:
    """`weight` is (..., M, N); its scales, in any shape, are a grid (..., ceil(M / rows), ceil(N / columns))."""

    weight: TensorEntry
    scale: TensorEntry
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.weight.fqn, self.scale.fqn)

    def fill(self, read: ReadPart, box: Box, out: Tensor) -> None:
        """Put the weights of `box`, whole rows of dim 0, into `out`."""
        import torch

        num_rows, num_columns = self.shape[-2:]
        grid = read(self.scale.fqn, Box.whole(self.scale.shape)).to(torch.float32)
        grid = grid.reshape(*self.shape[:-2], math.ceil(num_rows / self.rows), math.ceil(num_columns / self.columns))
        column_blocks = torch.arange(num_columns) // self.columns
        strip_rows = max(1, _STRIP_ELEMENTS // max(1, math.prod(self.shape[1:])))
        for strip in box.split_rows(strip_rows):
            first, end = strip.offsets[0], strip.ends[0]
            stored = read(self.weight.fqn, strip).to(torch.float32)
            if len(self.shape) == 2:
                scales = grid[torch.arange(first, end) // self.rows]
            else:
                scales = grid[first:end].repeat_interleave(self.rows, dim=-2)[..., :num_rows, :]
            out[first - box.offsets[0] : end - box.offsets[0]] = stored * scales[..., column_blocks]


def find_scaled(tensors: Mapping[str, TensorEntry], block_size: tuple[int, int] | None) -> Found:
    """The weights that have scales. `block_size` is the config's, in rows and columns.

    Raises DamagedError for a scale without its weight and for scales that fit no block size, UnsupportedError for an
    8-bit weight without scales and for scaled weights of other dtypes.
    """
    recipes: dict[str, Any] = {}
    for name, scale in tensors.items():
        suffix = next((s for s in _SCALE_SUFFIXES if name.endswith(s)), "")
        if not suffix or name.endswith(_ACTIVATION_SUFFIXES):
            continue
        weight = tensors.get(name.removesuffix(suffix))
        if not name.endswith(_SURE_SUFFIXES) and (weight is None or weight.dtype not in _FLOAT8):
            continue
        if weight is None:
            raise DamagedError(f"{name} scales a weight that is not there")
        if weight.dtype not in _FLOAT8 or scale.dtype not in _SCALE_DTYPES:
            raise UnsupportedError(f"{weight.fqn} of dtype {weight.dtype} with scales of {scale.dtype} is not known")
        if weight.fqn in recipes:
            raise DamagedError(f"{weight.fqn} has scales twice")
        recipes[weight.fqn] = ScaledWeight(weight, scale, *_block_of(weight, scale, block_size))
    unscaled = [n for n, e in tensors.items() if e.dtype in _FLOAT8 and n not in recipes]
    if unscaled:
        raise UnsupportedError(f"8-bit weights without scales: {name_some(unscaled)}")
    dropped = [name for name in tensors if name.endswith(_ACTIVATION_SUFFIXES)]
    return Found(recipes, tuple(dropped))


def _block_of(weight: TensorEntry, scale: TensorEntry, block_size: tuple[int, int] | None) -> tuple[int, int]:
    """How many rows and columns share a scale."""
    if len(weight.shape) < 2:
        raise UnsupportedError(f"{weight.fqn}: an 8-bit weight of shape {list(weight.shape)} is not known")
    *outer, num_rows, num_columns = weight.shape
    if scale.num_elements == 1 and math.prod(outer) == 1:
        return max(1, num_rows), max(1, num_columns)
    blocks = [(num_rows, num_columns), (1, num_columns)]
    for rows, columns in [block_size, *blocks] if block_size else blocks:
        grid = (*outer, math.ceil(num_rows / rows), math.ceil(num_columns / columns)) if rows and columns else ()
        one_each = columns == num_columns and scale.shape == grid[:-1]
        if scale.shape == grid or (grid and one_each):
            return rows, columns
    known = f" in blocks of {list(block_size)}" if block_size else ""
    raise DamagedError(
        f"{scale.fqn} of shape {list(scale.shape)} doesn't fit {weight.fqn} of shape {list(weight.shape)}{known}"
    )
