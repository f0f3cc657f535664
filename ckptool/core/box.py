"""Rectangular regions of a tensor: the only index arithmetic in the project."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The region `offsets[d] <= i_d < offsets[d] + sizes[d]` of a tensor; both tuples have one entry per tensor dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """True when the box has the dims of `shape` and lies inside it."""
        return len(self.sizes) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when no element is shared. 0-d boxes always share their one element."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(e <= o for o, e in zip(offsets, ends, strict=True)):
            return None
        return Box(offsets, tuple(e - o for o, e in zip(offsets, ends, strict=True)))

    def local_to(self, outer: Box) -> Box:
        """The same region in the coordinates of `outer`, which must contain it."""
        return Box(tuple(o - b for o, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def contains(self, other: Box) -> bool:
        return all(
            a <= b and b_end <= a_end
            for a, b, a_end, b_end in zip(self.offsets, other.offsets, self.ends, other.ends, strict=True)
        )

    def is_contiguous_in(self, shape: Sequence[int]) -> bool:
        """True when the region is one contiguous run of a C-contiguous tensor of this shape."""
        varying = [d for d, (size, n) in enumerate(zip(self.sizes, shape, strict=True)) if size != n]
        return not varying or all(size == 1 for size in self.sizes[: varying[-1]])

    def flat_start(self, shape: Sequence[int]) -> int:
        """Index of the region's first element in a flattened C-contiguous tensor of this shape."""
        start = 0
        for offset, n in zip(self.offsets, shape, strict=True):
            start = start * n + offset
        return start

    def split_rows(self, max_rows: int) -> list[Box]:
        """Cut along dim 0 into boxes of at most `max_rows` rows. 0-d and empty boxes come back whole."""
        if not self.sizes or self.sizes[0] <= max_rows:
            return [self]
        return self.cut_rows(range(max_rows, self.sizes[0], max_rows))

    def split(self, max_elements: int) -> Iterator[Box]:
        """Cut into boxes of at most `max_elements` elements that, one after another, have the box's in C order.

        An empty box comes back whole.
        """
        dim = next((d for d, size in enumerate(self.sizes) if size > 1), None)
        if self.num_elements <= max_elements or dim is None:
            yield self
            return
        row_elements = self.num_elements // self.sizes[dim]
        step = max(1, max_elements // row_elements)
        for start in range(0, self.sizes[dim], step):
            offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
            sizes = (*self.sizes[:dim], min(step, self.sizes[dim] - start), *self.sizes[dim + 1 :])
            yield from Box(offsets, sizes).split(max_elements)

    def cut_rows(self, cuts: Iterable[int]) -> list[Box]:
        """Cut along dim 0 before the given rows (relative to the box, ascending, each inside it)."""
        edges = [0, *cuts, self.sizes[0]]
        return [
            Box((self.offsets[0] + a, *self.offsets[1:]), (b - a, *self.sizes[1:]))
            for a, b in itertools.pairwise(edges)
        ]


_MAX_CORNERS = 1 << 23
_MAX_COMPARED = 1 << 20


def exact_cover_fault(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Why `boxes` are not an exact cover of a tensor of `shape`; "" when every element lies in exactly one box.

    Linear in the number of boxes, whoever chose them.
    """
    if _are_row_blocks_in_order(boxes, shape):
        return ""
    for box in boxes:
        if not box.fits(shape):
            return f"chunk at {list(box.offsets)} of size {list(box.sizes)} lies outside shape {list(shape)}"
    filled = [box for box in boxes if box.num_elements]
    cut_dims = [d for d, n in enumerate(shape) if any(box.sizes[d] != n for box in filled)]
    if len(filled) << len(cut_dims) > _MAX_CORNERS:
        return f"{len(filled)} chunks, cut along {len(cut_dims)} dims, are more than can be checked"
    if _corners_cancel(filled, shape, cut_dims):
        return ""
    covered, total = sum(box.num_elements for box in filled), math.prod(shape)
    return _overlap(filled) or (
        f"chunks cover {covered} of {total} elements" if covered != total else "chunks overlap and leave holes"
    )


def _corners_cancel(boxes: Sequence[Box], shape: Sequence[int], cut_dims: Sequence[int]) -> bool:
    """True for an exact cover of the filled boxes.

    A box's indicator function is the signed sum, over its 2**d corners, of functions that are 1 beyond the corner.
    Those are linearly independent, so the boxes add up to the whole exactly when all corners cancel with the whole's.
    """
    whole = [(Box.whole(shape), -1)] if math.prod(shape) else []
    sums: dict[str, int] = {}
    for box, weight in [*((box, 1) for box in boxes), *whole]:
        sides = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut_dims]
        for corner in itertools.product(*sides):
            # Keyed by text, whose hash is secret: tuples of integers can be chosen to have one hash.
            key = ",".join([str(position) for position, _ in corner])
            sums[key] = sums.get(key, 0) + weight * math.prod(sign for _, sign in corner)
    return not any(sums.values())


def _overlap(boxes: Sequence[Box]) -> str:
    """Two boxes that share elements, found by a sweep along dim 0; "" when there are none, or they are hard to find."""
    active: list[Box] = []
    num_compared = 0
    for box in sorted(boxes, key=lambda b: b.offsets):
        if box.offsets:
            active = [other for other in active if other.ends[0] > box.offsets[0]]
        num_compared += len(active) + 1
        if num_compared > _MAX_COMPARED:
            break
        for other in active:
            if box.intersect(other) is not None:
                return f"chunks at {list(other.offsets)} and {list(box.offsets)} overlap"
        active.append(box)
    return ""


def _are_row_blocks_in_order(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """True for the usual cover, cheaply: blocks of whole rows, one after another from the first row to the last."""
    if not shape or not boxes:
        return False
    inner_offsets, inner_sizes = (0,) * (len(shape) - 1), tuple(shape[1:])
    next_row = 0
    for box in boxes:
        offsets, sizes = box.offsets, box.sizes
        if offsets[:1] != (next_row,) or offsets[1:] != inner_offsets or sizes[1:] != inner_sizes or sizes[0] < 1:
            return False
        next_row += sizes[0]
    return next_row == shape[0]
