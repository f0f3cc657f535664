"""What a person may change of a position: go to another place, leave units out, or define the stream anew from here on.

Each is a new segment that begins where training stands, or later. What was trained is never rewritten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptool.core.order import ORDER_VERSION
from ckptool.core.position import DataPosition, Edit
from ckptool.core.segment import Segment
from ckptool.errors import UsageError


class Jump(NamedTuple):
    """What a jump does to the units: how many are trained again, and how many are left out."""

    num_repeated: int
    num_skipped: int


def place_of(position: DataPosition, number: int) -> int:
    """The place, in the present definition of the stream, of the unit with this number.

    Raises UsageError when that number belongs to an earlier definition.
    """
    segment = position.segment_of(number)
    if not shares_places(segment, position.segment):
        begins = min(s.start for s in position.segments if shares_places(s, position.segment))
        raise UsageError(
            f"unit {number} lies before unit {begins}, where the data or its mixture was changed",
            hint="resume from a checkpoint of that time, which knows the stream as it was",
        )
    return number - segment.start + segment.phase


def jump(position: DataPosition, number: int, place: int) -> tuple[DataPosition, Jump]:
    """From unit `number` on, the stream as it is from `place` on in its present definition.

    `number` is `position.consumed` for a seek, and beyond it for a skip that is still ahead. Raises UsageError when
    that changes nothing, or when `number` was trained or lies before another jump that is still ahead.
    """
    last = position.segment
    if number < position.consumed:
        raise UsageError(f"unit {number} is trained already: {position.consumed} come first")
    if number < last.start:
        raise UsageError(f"unit {number} lies before another change that is still ahead, at unit {last.start}")
    here = number - last.start + last.phase
    if place == here:
        raise UsageError(f"the stream is there already, at unit {number}")
    moved = replace(last, start=number, phase=place)
    return _with_segment(position, moved), Jump(max(0, here - place), max(0, place - here))


def redefine(position: DataPosition, definition: Segment) -> tuple[DataPosition, list[str]]:
    """The stream under another definition from the present place on, and one line for each thing that this changes.

    A source that stays as it is goes on where it stands. One whose units are others (its data, the sequence length or
    the seed changed) begins its next epoch: which of the new units were trained in the unfinished one can't be said.

    Raises UsageError when nothing changes, or when a jump is still ahead.
    """
    last = position.segment
    if last.start > position.consumed:
        raise UsageError(f"a change of the stream is still ahead, at unit {last.start}", hint="train past it first")
    changes = definition.changes_from(last)
    if not changes:
        raise UsageError("that is how the stream is defined already")
    definition = replace(definition, order_version=ORDER_VERSION)
    done = last.done_before(position.consumed)
    for source in definition.sources:
        known = next((s for s in reversed(position.segments) if s.source(source.name)), None)
        before = known.source(source.name) if known else None
        if known is None or before is None or known.same_units(definition, source.name):
            continue
        epoch, place = divmod(done[source.name], before.num_units)
        if place:
            left = before.num_units - place
            changes.append(f"{source.name}: {left} of {before.num_units} units of epoch {epoch} are left out")
        done[source.name] = (epoch + bool(place)) * source.num_units
    segment = replace(definition, start=position.consumed, done=done, phase=0)
    return _with_segment(position, segment), changes


def accept_data_change(offered: DataPosition, record: DataPosition, *, reason: str, when: str) -> DataPosition:
    """Where `record` stands, going on with the stream of `offered` although it is another; recorded as an edit.

    Equal streams need no accepting, and give what `offered.at(record)` gives.
    """
    if not offered.differences_from(record):
        return offered.at(record)
    changed, changes = redefine(offered.named_as_here(record), offered.segment)
    recorded = with_edit(changed, "accept-data-change", changes, reason=reason, when=when)
    return recorded.with_batch_size(offered.global_batch_size)


def with_edit(position: DataPosition, action: str, changes: list[str], *, reason: str, when: str) -> DataPosition:
    """The position with a line about what was done to it."""
    edit = Edit(action, position.consumed, position.num_steps, when, reason, tuple(changes))
    return replace(position, edits=(*position.edits, edit))


def shares_places(a: Segment, b: Segment) -> bool:
    """True when a place means the same in both: they differ by jumps only."""
    return replace(a, start=0, phase=0) == replace(b, start=0, phase=0)


def _with_segment(position: DataPosition, segment: Segment) -> DataPosition:
    """`segment` after the others, in the place of the last one when no unit lies between their starts."""
    kept = position.segments[:-1] if position.segment.start == segment.start else position.segments
    return replace(position, segments=(*kept, segment))
