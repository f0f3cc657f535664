"""DataPosition: where training stands in its data, as one integer over a pure order.

Units are numbered 0, 1, 2, ... in the order in which they are trained; `Segment` says which unit of which source each
number is. `consumed` is the number that comes next; the end of an epoch is not a state. Neither the world size nor the
batch size decides which unit a number is, so both may change at any step.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptool.core import order_v1
from ckptool.core.data_source import DataSource
from ckptool.core.history import NOTHING, Fed, add_histories
from ckptool.core.mixture import slots_of
from ckptool.core.segment import Segment, Unit
from ckptool.errors import MismatchError, UsageError

CURSOR_LENGTH = 8
RECORD_VERSION = 2


@dataclass(frozen=True)
class Stretch:
    """Steps in a row that trained equally many units each. A `global_batch_size` of 0: of unknown sizes (version 1)."""

    num_units: int
    num_steps: int
    global_batch_size: int


@dataclass(frozen=True)
class Edit:
    """What a person changed in the position or in its stream, after `unit` units and `step` steps. `when`: ISO 8601."""

    action: str
    unit: int
    step: int
    when: str
    reason: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class DataPosition:
    """A place in the stream of units, with all that defines the stream and the sizes of the steps so far.

    `segments` are in the order of their start, `stretches` in the order of training. `history` is the digest of the
    units that were trained, as far as `with_history` was told of them.
    """

    segments: tuple[Segment, ...]
    stretches: tuple[Stretch, ...]
    history: str = NOTHING
    edits: tuple[Edit, ...] = ()

    @classmethod
    def begin(
        cls,
        sources: Sequence[DataSource],
        *,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        weights: Mapping[str, float] | None = None,
    ) -> DataPosition:
        """The start of a stream over `sources`, mixed by `weights` per name (default: by their number of units).

        `seq_len` in tokens, `global_batch_size` in units a step. Raises UsageError for two sources of one name, a
        source without units, or weights that are not one positive number for each source.
        """
        segment = _define(sources, weights, seq_len, seed)
        return cls((segment,), (Stretch(0, 0, global_batch_size),))

    @property
    def consumed(self) -> int:
        """How many units were trained, which is the number of the next one."""
        return sum(stretch.num_units for stretch in self.stretches)

    @property
    def num_steps(self) -> int:
        """How many steps trained them."""
        return sum(stretch.num_steps for stretch in self.stretches)

    @property
    def global_batch_size(self) -> int:
        """Units that the next step trains."""
        return self.stretches[-1].global_batch_size

    @property
    def segment(self) -> Segment:
        """The last definition of the stream: what the data that is given must agree with."""
        return self.segments[-1]

    def unit(self, number: int) -> Unit:
        """The unit with this number."""
        return self.units(range(number, number + 1))[0]

    def units(self, numbers: range) -> list[Unit]:
        """The units with these numbers, which rise; a step of the range other than 1 is a rank's part."""
        return [unit for segment, part in self._parts(numbers) for unit in segment.units(part)]

    def segment_of(self, number: int) -> Segment:
        """The definition of the stream that unit `number` belongs to."""
        return next(segment for segment in reversed(self.segments) if segment.start <= number)

    def next_units(self) -> range:
        """The numbers of the units that the next step trains."""
        return step_units(self.consumed, self.global_batch_size)

    def advance(self, num_steps: int = 1) -> DataPosition:
        """The position after `num_steps` more optimizer steps. To be called once they have been taken, not before."""
        last = self.stretches[-1]
        num_units = last.num_units + num_steps * last.global_batch_size
        return self._with_last(replace(last, num_units=num_units, num_steps=last.num_steps + num_steps))

    def with_history(self, parts: Sequence[Fed]) -> DataPosition:
        """The position with what each rank was fed since the last time added to its history.

        Raises MismatchError when that is not as many units as the position has advanced since.
        """
        starts = {part.start for part in parts}
        num_fed = sum(part.num_units for part in parts)
        if len(starts) != 1 or starts.pop() + num_fed != self.consumed:
            raise MismatchError(
                f"the ranks were fed {num_fed} units, which is not what brings the position to {self.consumed}: "
                "data was trained twice or left out",
                hint="advance the position once after each optimizer step, on every rank",
            )
        return replace(self, history=add_histories([self.history, *(part.digest for part in parts)]))

    def with_batch_size(self, global_batch_size: int) -> DataPosition:
        """The same place, with steps of another size from here on."""
        last = self.stretches[-1]
        if last.global_batch_size == global_batch_size:
            return self
        if last.num_steps == last.num_units == 0:
            return self._with_last(Stretch(0, 0, global_batch_size))
        return replace(self, stretches=(*self.stretches, Stretch(0, 0, global_batch_size)))

    def at(self, record: DataPosition) -> DataPosition:
        """Where `record`, read from a checkpoint, stands, with the batch size of this one.

        Raises MismatchError, naming each difference, when this one's stream is not the one that `record` goes on with.
        """
        differences = self.differences_from(record)
        if differences:
            raise MismatchError(
                "the data is not what the checkpoint was trained on: " + "; ".join(differences),
                hint="give the data, --seq-len and --seed of that run, or begin a new run with --init-from",
            )
        return self.named_as_here(record).with_batch_size(self.global_batch_size)

    def differences_from(self, record: DataPosition) -> list[str]:
        """What differs between the streams' present definitions, as `name old -> new`."""
        return self.segment.changes_from(self.named_as_here(record).segment)

    def cursor(self) -> list[int]:
        """The numbers stored in `data.cursor`: consumed, order version, then zeros; CURSOR_LENGTH in all."""
        return [self.consumed, self.segment.order_version] + [0] * (CURSOR_LENGTH - 2)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data; `consumed` is written out for those who read nothing else."""
        return {"record_version": RECORD_VERSION, "consumed": self.consumed, **asdict(self)}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, location: str, num_steps: int | None = None) -> DataPosition:
        """Parse `to_json`'s text, or a record of version 1, which doesn't know its `num_steps`.

        Raises DamagedError, naming `location`, when it is not such a record.
        """
        from ckptool.core.position_record import parse

        return parse(text, location, num_steps)

    def _parts(self, numbers: range) -> Iterator[tuple[Segment, range]]:
        starts = [bisect_left(numbers, segment.start) for segment in self.segments]
        for segment, start, end in zip(self.segments, starts, [*starts[1:], len(numbers)], strict=True):
            if start < end:
                yield segment, numbers[start:end]

    def named_as_here(self, record: DataPosition) -> DataPosition:
        """`record`; in version 1, which has no names, its source gets the name that it has here."""
        old, new = record.segment, self.segment
        if old.order_version != order_v1.ORDER_VERSION or len(new.sources) != 1:
            return record
        named = replace(old, sources=(replace(old.sources[0], name=new.sources[0].name),))
        return replace(record, segments=(*record.segments[:-1], named))

    def _with_last(self, stretch: Stretch) -> DataPosition:
        return replace(self, stretches=(*self.stretches[:-1], stretch))


def step_units(consumed: int, global_batch_size: int) -> range:
    """The numbers of the units of a step that begins at unit `consumed`."""
    return range(consumed, consumed + global_batch_size)


def rank_units(units: range, rank: int, world_size: int) -> range:
    """Rank `rank`'s part of a step's units: those g where `(g - units.start) % world_size == rank`."""
    return units[rank::world_size]


def _define(sources: Sequence[DataSource], weights: Mapping[str, float] | None, seq_len: int, seed: int) -> Segment:
    """A segment from unit 0 on. The sources are sorted by name: the order in which they are given means nothing."""
    by_name = {source.name: source for source in sorted(sources, key=lambda source: source.name)}
    if len(by_name) < len(sources) or not by_name:
        raise UsageError("two sources have one name" if by_name else "no sources of data")
    empty = [name for name, source in by_name.items() if source.num_units < 1]
    if empty:
        raise UsageError(f"the source {empty[0]} has no units")
    if weights is None:
        weights = {name: source.num_units for name, source in by_name.items()}
    if set(weights) != set(by_name):
        names = ", ".join(sorted(set(weights) ^ set(by_name)))
        raise UsageError(f"weights and sources are not of the same names: {names}", hint="one weight for each source")
    slots = slots_of({name: weights[name] for name in by_name})
    return Segment(0, tuple(by_name.values()), slots, seq_len, seed)
