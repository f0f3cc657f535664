"""What a checkpoint holds: tensors cut into chunks, and opaque objects, each with the place of its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.core.dtypes import ITEMSIZE_BYTES

#: torch's own limit on the number of tensor dims.
MAX_DIMS = 64


def is_possible_shape(shape: Sequence[int]) -> bool:
    """True when torch can count in such a tensor: an empty one has strides too, and they must not overflow."""
    return len(shape) <= MAX_DIMS and math.prod(max(size, 1) for size in shape) < 1 << 59


@dataclass(frozen=True, slots=True)
class Locator:
    """A byte range `[offset, offset + length)` of a file, the file named relative to the checkpoint's folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored box of a tensor. `locator` is None in a target manifest, whose bytes don't exist yet."""

    box: Box
    locator: Locator | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical tensor. `dtype` is a torch name without the `torch.` prefix; `chunks` cover `shape` exactly once."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize_bytes


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A non-tensor value, stored as a `torch.save` blob (DCP calls these byte entries)."""

    fqn: str
    locator: Locator | None = None
