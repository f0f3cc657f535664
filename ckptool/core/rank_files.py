"""Which rank's file stores which box, so that every rank of a mesh finds what it holds, and all is stored once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping

from ckptool.core.box import Box
from ckptool.core.layout import Layout
from ckptool.core.mesh import split
from ckptool.core.tensors import TensorEntry

MAX_GROUP_RANKS = 64

#: In the order in which a tensor's elements lie in C order, of the boxes' first elements.
Stored = list[tuple[Box, int]]


def assign(
    tensors: Iterable[TensorEntry], layout: Layout, max_chunk_bytes: int, max_band_bytes: int
) -> dict[str, Stored]:
    """fqn -> the boxes to store, each with the rank in whose file it goes.

    No box goes beyond what one rank holds. What several ranks hold is stored with the one whose name says so
    (`Layout.own_rank`), else with the one that has least so far. Boxes of whole rows have at most `max_chunk_bytes`;
    for others the rows around them have at most `max_band_bytes`.
    """
    loads = [0] * layout.mesh.world_size
    assigned = {}
    for entry in tensors:
        stored: Stored = []
        for held in split(entry.shape, layout.mesh, layout.placements[entry.fqn]):
            own = layout.own_rank(entry.fqn)
            rank = own if own in held.ranks else min(held.ranks, key=loads.__getitem__)
            for box in held.boxes:
                loads[rank] += box.num_elements * entry.itemsize_bytes
                max_bytes = max_chunk_bytes if box.is_contiguous_in(entry.shape) else max_band_bytes
                max_elements = max(1, max_bytes // entry.itemsize_bytes)
                stored += [(piece, rank) for piece in pieces(box, entry.shape, max_elements)]
        stored.sort(key=lambda place: place[0].offsets)
        assigned[entry.fqn] = stored or [(Box.whole(entry.shape), 0)]
    return assigned


def groups_of_ranks(assigned: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]) -> list[list[int]]:
    """The ranks that store something, those together whose boxes lie side by side: one read of a band serves them all.

    At most MAX_GROUP_RANKS are put together, since their files are written at the same time.
    """
    leaders: dict[int, int] = {}

    def leader(rank: int) -> int:
        while leaders.setdefault(rank, rank) != rank:
            rank = leaders[rank]
        return rank

    for fqn, stored in assigned.items():
        by_band: dict[Box, int] = {}
        for box, rank in stored:
            first = by_band.setdefault(band(box, shapes[fqn]), rank)
            leaders[leader(rank)] = leader(first)
    groups: dict[int, list[int]] = {}
    for rank in sorted(leaders):
        groups.setdefault(leader(rank), []).append(rank)
    return [group[i : i + MAX_GROUP_RANKS] for group in groups.values() for i in range(0, len(group), MAX_GROUP_RANKS)]


@functools.lru_cache(maxsize=1 << 14)
def pieces(box: Box, shape: tuple[int, ...], max_elements: int) -> tuple[Box, ...]:
    """Cut a box so that each piece's band has at most `max_elements`: boxes side by side are then read together."""
    return tuple(_cut(box, shape, 0, max_elements))


def _cut(box: Box, shape: tuple[int, ...], dim: int, max_elements: int) -> Iterator[Box]:
    if dim == len(shape) or band(box, shape).num_elements <= max_elements:
        yield box
        return
    num_rows = max(1, max_elements // math.prod(shape[dim + 1 :]))
    for start in range(0, box.sizes[dim], num_rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(num_rows, box.sizes[dim] - start), *box.sizes[dim + 1 :])
        yield from _cut(Box(offsets, sizes), shape, dim + 1, max_elements)


def band(box: Box, shape: tuple[int, ...]) -> Box:
    """The smallest box around `box` that is one contiguous run of a tensor of this shape.

    It is whole in every dim after the first one in which `box` has more than one index.
    """
    if box.is_contiguous_in(shape):
        return box
    dim = next(d for d, size in enumerate(box.sizes) if size != 1)
    rest = Box.whole(shape[dim + 1 :])
    return Box((*box.offsets[: dim + 1], *rest.offsets), (*box.sizes[: dim + 1], *rest.sizes))
