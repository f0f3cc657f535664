"""A mesh of ranks, and which part of a tensor each of them holds: DTensor's split rule, without torch.

The rule is that of torch/distributed/tensor/_utils.py (`compute_local_shape_and_global_offset`) and placement_types.py:
mesh axes cut from left to right, each what those before it left over, in pieces of ceil(n / size) as torch.chunk does.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.errors import UsageError

MAX_WORLD_SIZE = 1 << 17


@dataclass(frozen=True)
class Mesh:
    """Named axes of a grid of ranks, the last one varying fastest: rank = ((i_0 * n_1) + i_1) * n_2 + i_2 ..."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `dp_replicate=2,dp_shard=4,tp=2`. Raises UsageError when it isn't a mesh."""
        axes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", part)
            if match is None:
                raise UsageError(f"{part.strip()!r} is no mesh axis", hint="write --mesh dp_shard=4,tp=2")
            if match[1] in axes:
                raise UsageError(f"the mesh has two axes named {match[1]!r}")
            axes[match[1]] = int(match[2])
        return cls.of(axes)

    @classmethod
    def of(cls, axes: dict[str, int]) -> Mesh:
        """The mesh with these axis sizes. Raises UsageError for sizes that no job has."""
        mesh = cls(tuple(axes), tuple(axes.values()))
        if min(mesh.sizes) < 1 or mesh.world_size > MAX_WORLD_SIZE:
            raise UsageError(f"a mesh of {mesh} has {mesh.world_size} ranks: from 1 to {MAX_WORLD_SIZE} are possible")
        return mesh

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def to_json(self) -> dict[str, int]:
        """The size of each axis, from the outermost on."""
        return dict(zip(self.axes, self.sizes, strict=True))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.to_json().items())


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts tensor dim `dim`.

    With `num_parts` > 1 it is torch's `_StridedShard(dim, split_factor=num_parts)`: the dim is first cut into that many
    parts, each of which the axis cuts. FSDP2 over a tensor-parallel parameter is of this kind, and fused projections.
    """

    dim: int
    num_parts: int = 1


Placement = Replicate | Shard

#: Indices of one tensor dim, as ascending pieces [start, end).
_Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a group of ranks holds of a tensor: the same boxes on each of `ranks` (ascending)."""

    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def split(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> tuple[Held, ...]:
    """Who holds what of a tensor of `shape`, with one placement per mesh axis.

    Different groups hold disjoint boxes, and together all of the tensor; ranks that hold nothing are not listed. A box
    is what is contiguous in every dim: a rank has several only by `num_parts`. The groups are in the order of their
    first ranks. The placements' dims must be from 0 to len(shape) - 1.
    """
    strides = [math.prod(mesh.sizes[i + 1 :]) for i in range(len(mesh.sizes))]
    cutting = [i for i, placement in enumerate(placements) if isinstance(placement, Shard)]
    copying = [i for i in range(len(placements)) if i not in cutting]
    copies = _ranks(copying, mesh, strides)
    runs_of = [_dim_runs(dim, size, mesh, placements) for dim, size in enumerate(shape)]
    held = []
    for position in itertools.product(*(range(mesh.sizes[i]) for i in cutting)):
        first = sum(index * strides[i] for index, i in zip(position, cutting, strict=True))
        at = dict(zip(cutting, position, strict=True))
        per_dim = [runs[tuple(at[i] for i in axes)] for axes, runs in runs_of]
        boxes = tuple(
            Box(tuple(start for start, _ in sides), tuple(end - start for start, end in sides))
            for sides in itertools.product(*per_dim)
        )
        if boxes:
            held.append(Held(boxes, tuple(first + rank for rank in copies)))
    return tuple(held)


def _ranks(axes: Sequence[int], mesh: Mesh, strides: Sequence[int]) -> list[int]:
    """The ranks at position 0 of all axes but these."""
    positions = itertools.product(*(range(mesh.sizes[i]) for i in axes))
    return [sum(index * strides[i] for index, i in zip(position, axes, strict=True)) for position in positions]


def _dim_runs(
    dim: int, size: int, mesh: Mesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], _Runs]]:
    """The mesh axes that cut a tensor dim, and the indices held at each position along them."""
    axes: tuple[int, ...] = ()
    runs: dict[tuple[int, ...], _Runs] = {(): ((0, size),) if size else ()}
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            axes += (i,)
            runs = {
                (*position, index): part
                for position, left in runs.items()
                for index, part in enumerate(_cut(left, mesh.sizes[i], placement.num_parts))
            }
    return axes, runs


def _cut(runs: _Runs, num_ranks: int, num_parts: int) -> list[_Runs]:
    """What each of the ranks along an axis gets of these indices."""
    parts = _chunk(runs, num_parts)
    return [_joined(pieces) for pieces in zip(*(_chunk(part, num_ranks) for part in parts), strict=True)]


def _chunk(runs: _Runs, num_chunks: int) -> list[_Runs]:
    """torch.chunk's rule: pieces of ceil(n / num_chunks) indices, the last ones smaller or empty."""
    total = sum(end - start for start, end in runs)
    length = -(-total // num_chunks)
    return [_slice(runs, i * length, (i + 1) * length) for i in range(num_chunks)]


def _slice(runs: _Runs, first: int, last: int) -> _Runs:
    """The indices at places [first, last) of all these runs in a row."""
    found = []
    place = 0
    for start, end in runs:
        a, b = max(start, start + first - place), min(end, start + last - place)
        if a < b:
            found.append((a, b))
        place += end - start
    return tuple(found)


def _joined(pieces: Sequence[_Runs]) -> _Runs:
    """One piece after the other, neighbours made one."""
    joined: list[tuple[int, int]] = []
    for start, end in itertools.chain.from_iterable(pieces):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
