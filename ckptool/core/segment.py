"""Segment: a stretch of the stream under one definition - sources, their weights, sequence length and seed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from ckptool.core import order, order_v1
from ckptool.core.data_source import DataSource
from ckptool.core.mixture import BLOCK_SLOTS, block_layout


class Unit(NamedTuple):
    """A unit to be trained: the epoch of its source, its index there, and the source's name."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs here
    source: str


@dataclass(frozen=True)
class Segment:
    """The stream from unit `start` on, up to the next segment.

    `slots` are the sources' shares of each block of 1024 units. `done` says how many units of each source, those of
    earlier segments included, the stream had given before this segment's place 0; `phase` is the place of unit `start`.
    `seq_len` is in tokens.
    """

    start: int
    sources: tuple[DataSource, ...]
    slots: tuple[int, ...]
    seq_len: int
    seed: int
    done: Mapping[str, int] = field(default_factory=dict)
    phase: int = 0
    order_version: int = order.ORDER_VERSION

    def units(self, numbers: range) -> list[Unit]:
        """The units with these numbers, which rise; none of them is before `start`."""
        places = _shifted(numbers, self.phase - self.start)
        if len(self.sources) == 1:
            return self._units_of(0, _shifted(places, self.done.get(self.sources[0].name, 0)))
        owners, counters = self._counters(places)
        units = [iter(self._units_of(source, of_source)) for source, of_source in enumerate(counters)]
        return [next(units[owner]) for owner in owners]

    def done_before(self, number: int) -> dict[str, int]:
        """How many units each source has given before unit `number`, whatever its segment; past sources included."""
        blocks, slot = divmod(number - self.start + self.phase, BLOCK_SLOTS)
        partial = Counter(self._layout(blocks)[0][:slot]) if len(self.sources) > 1 else {0: slot}
        here = {
            source.name: self.done.get(source.name, 0) + blocks * slots + partial.get(i, 0)
            for i, (source, slots) in enumerate(zip(self.sources, self.slots, strict=True))
        }
        return {**self.done, **here}

    def definition(self) -> dict[str, Any]:
        """What defines the stream here, flat, for comparing: one entry for each thing that can differ."""
        shares = {f"slots of {s.name}": n for s, n in zip(self.sources, self.slots, strict=True)}
        described = {f"{s.name}.{key}": value for s in self.sources for key, value in s.described().items()}
        order_of_names = ", ".join(source.name for source in self.sources)
        return {"sources": order_of_names, **described, **shares, "seq_len": self.seq_len, "seed": self.seed}

    def changes_from(self, old: Segment) -> list[str]:
        """What differs between two definitions, as `name old -> new`."""
        before, now = old.definition(), self.definition()
        return [f"{n} {before.get(n)} -> {now.get(n)}" for n in {**before, **now} if before.get(n) != now.get(n)]

    def same_units(self, other: Segment, name: str) -> bool:
        """True when the source `name` has the same units in the same order in both."""
        mine, theirs = self.source(name), other.source(name)
        versions = {self.order_version, other.order_version}
        return mine == theirs and (self.seq_len, self.seed) == (other.seq_len, other.seed) and len(versions) == 1

    def source(self, name: str) -> DataSource | None:
        return next((source for source in self.sources if source.name == name), None)

    def _counters(self, places: range) -> tuple[list[int], list[list[int]]]:
        """The source of each place of the segment, and per source the numbers of units that it had given before."""
        owners_found: list[int] = []
        counters: list[list[int]] = [[] for _ in self.sources]
        for block in range(places.start // BLOCK_SLOTS, -(-places.stop // BLOCK_SLOTS)):
            first = block * BLOCK_SLOTS
            in_block = places[bisect_left(places, first) : bisect_left(places, first + BLOCK_SLOTS)]
            if not in_block:
                continue
            owners, before = self._layout(block)
            done = [self.done.get(s.name, 0) + block * n for s, n in zip(self.sources, self.slots, strict=True)]
            slots = slice(in_block.start - first, in_block.stop - first, in_block.step)
            for owner, number in zip(owners[slots], before[slots], strict=True):
                counters[owner].append(done[owner] + number)
            owners_found += owners[slots]
        return owners_found, counters

    def _layout(self, block: int) -> tuple[list[int], list[int]]:
        # Keyed by what was done before place 0, not by `start`: a skip moves start and phase, and changes no block.
        return block_layout(self.seed, sum(self.done.values()), block, self.slots)

    def _units_of(self, number: int, counters: Sequence[int]) -> list[Unit]:
        """The units of a source that come after so many others of it; the counters rise."""
        source = self.sources[number]
        units: list[Unit] = []
        begin = 0
        while begin < len(counters):
            epoch = counters[begin] // source.num_units
            first, last = epoch * source.num_units, (epoch + 1) * source.num_units
            end = bisect_left(counters, last, begin)
            indices = self._indices(source, epoch, [counter - first for counter in counters[begin:end]])
            # What Unit(epoch, index, name) does for each, in half the time.
            units += map(tuple.__new__, repeat(Unit), zip(repeat(epoch), indices, repeat(source.name)))
            begin = end
        return units

    def _indices(self, source: DataSource, epoch: int, places: list[int]) -> list[int]:
        if self.order_version == order_v1.ORDER_VERSION:
            return [order_v1.unit_index(self.seed, epoch, source.num_units, place) for place in places]
        return order.unit_indices(self.seed, source.name, epoch, source.num_units, places)


def _shifted(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by, numbers.step)
