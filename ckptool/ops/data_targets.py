"""What a person types for a place in the data: `unit:96`, `step:16`, `token:1_000_000`, `epoch:2`, `+50`, `-50`."""

from __future__ import annotations

import re
from itertools import pairwise

from ckptool.core.position import DataPosition
from ckptool.core.position_edits import place_of
from ckptool.errors import UsageError

_FORMS = "unit:N, step:N, token:N, epoch:K, +N or -N"


def parse_place(position: DataPosition, text: str) -> int:
    """The place in the present definition of the stream that `text` means.

    Raises UsageError when it means none, or one that lies before the present definition.
    """
    match = re.fullmatch(r"(unit:|step:|token:|epoch:|\+|-)([0-9][0-9_]*)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no place in the data", hint=f"write {_FORMS}")
    kind, number = match[1].rstrip(":"), int(match[2])
    if number >= 1 << 62:
        raise UsageError(f"{text!r} lies beyond any data")
    if kind == "epoch":
        return _epoch_start(position, number)
    if kind in "+-":
        last = position.segment_of(position.consumed)
        place = position.consumed - last.start + last.phase + (number if kind == "+" else -number)
        if place < 0:
            raise UsageError(f"{number} units back is before the data's present definition begins")
        return place
    return place_of(position, parse_number(position, text))


def parse_number(position: DataPosition, text: str) -> int:
    """The number of the unit that `unit:N`, `step:N` (the first of the step after N) or `token:N` means."""
    match = re.fullmatch(r"(unit|step|token):([0-9][0-9_]*)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no unit of the stream", hint="write unit:N, step:N or token:N")
    number = int(match[2])
    if match[1] == "step":
        return unit_of_step(position, number)
    return unit_of_token(position, number) if match[1] == "token" else number


def unit_of_step(position: DataPosition, step: int) -> int:
    """The number of the first unit that is trained after `step` steps; steps ahead have the present batch size."""
    unit = 0
    for stretch in position.stretches:
        if step < stretch.num_steps:
            if stretch.global_batch_size == 0:
                raise UsageError(
                    f"where step {step} began was not recorded: it is older than records of steps", hint="use unit:N"
                )
            return unit + step * stretch.global_batch_size
        unit, step = unit + stretch.num_units, step - stretch.num_steps
    return unit + step * position.global_batch_size


def unit_of_token(position: DataPosition, num_tokens: int) -> int:
    """The number of the unit that holds token `num_tokens` of the stream, each unit counted as `seq_len` tokens.

    Raises UsageError when units have no fixed length.
    """
    if any(source.unit_kind == "document" for segment in position.segments for source in segment.sources):
        raise UsageError("documents have no fixed number of tokens", hint="use unit:N or step:N")
    for segment, following in pairwise(position.segments):
        num_here = (following.start - segment.start) * segment.seq_len
        if num_tokens < num_here:
            return segment.start + num_tokens // segment.seq_len
        num_tokens -= num_here
    return position.segment.start + num_tokens // position.segment.seq_len


def _epoch_start(position: DataPosition, epoch: int) -> int:
    segment = position.segment
    if len(segment.sources) > 1:
        raise UsageError("each source of a mixture has its own epochs", hint="use unit:N, step:N or token:N")
    (source,) = segment.sources
    place = epoch * source.num_units - segment.done.get(source.name, 0)
    if place < 0:
        raise UsageError(f"epoch {epoch} began before the data's present definition")
    return place


def counters_at(position: DataPosition, place: int) -> dict[str, tuple[int, int]]:
    """Per source of the present definition, the (epoch, place in it) where it stands at a place of the stream."""
    segment = position.segment
    done = segment.done_before(place + segment.start - segment.phase)
    return {source.name: divmod(done[source.name], source.num_units) for source in segment.sources}
