"""Boxes of tensors that become boxes of another one: how a tensor is made of several, a piece at a time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptool.core.box import Box


@dataclass(frozen=True, slots=True)
class Move:
    """The elements of `source_box` of the tensor `source` become those of `box` of the target, in their order.

    Sizes of one aside, the boxes have the same sizes.
    """

    source: str
    source_box: Box
    box: Box

    def source_of(self, part: Box) -> Box:
        """Where the elements of `part`, a box inside `box`, are in the source."""
        return _placed(part, self.box, self.source_box)

    def target_of(self, part: Box) -> Box:
        """Where the elements of `part`, a box inside `source_box`, come to be in the target."""
        return _placed(part, self.source_box, self.box)


def _placed(part: Box, inside: Box, onto: Box) -> Box:
    """The box that lies in `onto` as `part` lies in `inside`."""
    spans = zip(part.offsets, part.sizes, inside.offsets, inside.sizes, strict=True)
    cuts = iter([(start - first, size) for start, size, first, whole in spans if whole != 1])
    offsets, sizes = [], []
    for first, whole in zip(onto.offsets, onto.sizes, strict=True):
        start, size = next(cuts) if whole != 1 else (0, 1)
        offsets.append(first + start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Moves:
    """All moves that make a target, each a contiguous run of it and of its source, one after the other."""

    moves: tuple[Move, ...]
    #: The index, in the flattened target, of each one's first element.
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(move.source for move in self.moves))

    def pieces(self, box: Box, cut: Callable[[Box], Iterable[Box]]) -> Iterator[tuple[Box, str, Box]]:
        """What makes `box`, a contiguous run of the target, in the order of its elements: a piece of the target, the
        source's name, the same piece there. `cut` cuts a source's box into pieces that lie in it one after another."""
        start = box.flat_start(self.shape)
        for i in range(bisect.bisect_right(self.starts, start) - 1, len(self.moves)):
            if self.starts[i] >= start + box.num_elements:
                return
            move = self.moves[i]
            common = move.box.intersect(box)
            if common is not None:
                for piece in cut(move.source_of(common)):
                    yield move.target_of(piece), move.source, piece


def runs_in_order(moves: Sequence[Move], shape: tuple[int, ...]) -> Moves | None:
    """The moves in the order of the target's elements; None when they aren't contiguous runs that cover it exactly."""
    placed = sorted(((move.box.flat_start(shape), move) for move in moves), key=lambda pair: pair[0])
    end = 0
    for start, move in placed:
        if start != end or not move.box.num_elements or not move.box.is_contiguous_in(shape):
            return None
        end += move.box.num_elements
    if end != math.prod(shape):
        return None
    return Moves(tuple(move for _, move in placed), tuple(start for start, _ in placed), shape)
