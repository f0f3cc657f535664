"""Segment: a stretch of the stream under one definition - sources, their weights, sequence length and seed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
        owners_and_counters = self._counters(places)
        counters: dict[int, list[int]] = {}
        for source, counter in owners_and_counters:
            counters.setdefault(source, []).append(counter)
        units = {source: iter(self._units_of(source, of_source)) for source, of_source in counters.items()}
        return [next(units[source]) for source, _ in owners_and_counters]

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

    def _counters(self, places: range) -> list[tuple[int, int]]:
        """For each place of the segment, the source and how many units it had given before."""
        done = [self.done.get(source.name, 0) for source in self.sources]
        found: list[tuple[int, int]] = []
        for block in range(places.start // BLOCK_SLOTS, -(-places.stop // BLOCK_SLOTS)):
            first = block * BLOCK_SLOTS
            in_block = places[bisect_left(places, first) : bisect_left(places, first + BLOCK_SLOTS)]
            owners, before = self._layout(block) if in_block else ([], [])
            for slot in _shifted(in_block, -first):
                source = owners[slot]
                found.append((source, done[source] + block * self.slots[source] + before[slot]))
        return found

    def _layout(self, block: int) -> tuple[list[int], list[int]]:
        # Keyed by what was done before place 0, not by `start`: a skip moves start and phase, and changes no block.
        return block_layout(self.seed, sum(self.done.values()), block, self.slots)

    def _units_of(self, number: int, counters: Sequence[int]) -> list[Unit]:
        """The units of a source that come after so many others of it; the counters rise."""
        source = self.sources[number]
        units: list[Unit] = []
        for epoch, of_epoch in groupby(counters, key=lambda counter: counter // source.num_units):
            first = epoch * source.num_units
            indices = self._indices(source, epoch, [counter - first for counter in of_epoch])
            units += [Unit(epoch, index, source.name) for index in indices]
        return units

    def _indices(self, source: DataSource, epoch: int, places: list[int]) -> list[int]:
        if self.order_version == order_v1.ORDER_VERSION:
            return [order_v1.unit_index(self.seed, epoch, source.num_units, place) for place in places]
        return order.unit_indices(self.seed, source.name, epoch, source.num_units, places)


def _shifted(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by, numbers.step)
