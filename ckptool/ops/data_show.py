"""What a data position says: where training stands, who reads what next, and what was trained between two of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from ckptool.core import order_v1
from ckptool.core.plan import Result
from ckptool.core.position import DataPosition, Stretch, rank_units
from ckptool.core.segment import Segment
from ckptool.errors import MismatchError, UsageError
from ckptool.ops.data_read import read_position
from ckptool.ops.data_text import unit_texts
from ckptool.storage.files import Place
from ckptool.storage.place import local_path

#: World sizes above this are not listed, though they may divide the batch.
_MAX_LISTED_WORLD_SIZE = 1024


def show_position(name: str, *, root: Place | None = None, num_next: int = 4, text: bool = False) -> Result:
    """Position, epochs and tokens per source, the next units, world sizes that share the batch evenly, and all edits.

    `text` adds the text of the next units. Raises NotFoundError for a checkpoint without a data position,
    UnsupportedError when the text isn't there.
    """
    stored = read_position(name, root)
    position = stored.position
    ahead = range(position.consumed, position.consumed + num_next)
    next_units = _units(position, ahead)
    if text:
        for unit, its_text in zip(
            next_units, unit_texts(local_path(stored.path, "--text"), position, position.units(ahead)), strict=True
        ):
            unit["text"] = its_text
    batch = position.global_batch_size
    details = {
        "consumed": position.consumed,
        "step": stored.step,
        "global_batch_size": batch,
        "seq_len": position.segment.seq_len,
        "seed": position.segment.seed,
        "order_version": position.segment.order_version,
        "sources": sources_at(position),
        "next_units": next_units,
        "even_world_sizes": [w for w in range(1, min(batch, _MAX_LISTED_WORLD_SIZE) + 1) if batch % w == 0],
        "max_world_size": batch,
        "segments": [_segment(segment) for segment in position.segments],
        "stretches": [asdict(stretch) for stretch in position.stretches],
        "edits": [asdict(edit) for edit in position.edits],
        "history": position.history,
        "num_lanes": stored.num_lanes,
    }
    return Result("data show", str(stored.path), details=details)


def plan_step(name: str, world_size: int, *, root: Place | None = None, micro_batch_size: int = 1) -> Result:
    """Which units of the next step each of `world_size` ranks reads, in micro-batches.

    Raises UsageError for more ranks than units.
    """
    stored = read_position(name, root)
    position = stored.position
    step = position.next_units()
    if not 1 <= world_size <= len(step):
        raise UsageError(
            f"{world_size} ranks can't share a global batch of {len(step)} units",
            hint=f"any number from 1 to {len(step)} can",
        )
    longest = len(rank_units(step, 0, world_size))
    num_micro_batches = -(-longest // micro_batch_size)
    ranks = []
    for rank in range(world_size):
        mine = rank_units(step, rank, world_size)
        num_empty = num_micro_batches - -(-len(mine) // micro_batch_size)
        ranks.append({"rank": rank, "units": _units(position, mine), "num_dummy_micro_batches": num_empty})
    details = {
        "consumed": position.consumed,
        "global_batch_size": len(step),
        "world_size": world_size,
        "num_micro_batches": num_micro_batches,
        "ranks": ranks,
    }
    return Result("data plan", str(stored.path), details=details)


def diff_positions(earlier: str, later: str, *, root: Place | None = None) -> Result:
    """What was trained between two checkpoints of one run.

    Raises MismatchError when the later one doesn't go on from the earlier one.
    """
    before, after = read_position(earlier, root), read_position(later, root)
    old, new = before.position, after.position
    fault = _why_not_after(old, new)
    if fault:
        raise MismatchError(f"{after.path} does not go on from {before.path}: {fault}")
    numbers = {source["name"]: source["num_units"] for source in sources_at(old)}
    trained = [
        {**source, "num_units": source["num_units"] - numbers.get(source["name"], 0)} for source in sources_at(new)
    ]
    details = {
        "from_unit": old.consumed,
        "to_unit": new.consumed,
        "num_steps": new.num_steps - old.num_steps,
        "trained": [{key: source[key] for key in ("name", "num_units", "epoch", "place")} for source in trained],
        "segments": [_segment(segment) for segment in new.segments if segment not in old.segments],
        "edits": [asdict(edit) for edit in new.edits[len(old.edits) :]],
    }
    return Result("data diff", str(after.path), details=details)


def sources_at(position: DataPosition) -> list[dict[str, Any]]:
    """Per source, those of the past included: units given in all, and the place in its epoch."""
    segment = position.segment_of(position.consumed)
    done = segment.done_before(position.consumed)
    shares = dict(zip((source.name for source in segment.sources), segment.slots, strict=True))
    found = []
    for name in sorted(done):
        known = next(s for s in (one.source(name) for one in reversed(position.segments)) if s is not None)
        epoch, place = divmod(done[name], known.num_units)
        num_trained = _num_trained(position, name)
        found.append(
            {
                "name": name,
                "slots": shares.get(name, 0),
                "epoch": epoch,
                "place": place,
                "epoch_units": known.num_units,
                "unit_kind": known.unit_kind,
                "num_units": sum(num_trained.values()),
                "num_tokens": sum(seq_len * units for seq_len, units in num_trained.items()),
                "fingerprint": dict(known.fingerprint),
            }
        )
    return found


def _num_trained(position: DataPosition, name: str) -> dict[int, int]:
    """By sequence length, the units of a source that were trained, one trained twice counted twice."""
    units: dict[int, int] = {}
    ends = [*(segment.start for segment in position.segments[1:]), position.consumed]
    for segment, end in zip(position.segments, ends, strict=True):
        end = min(end, position.consumed)
        if segment.start < end and segment.source(name) is not None:
            num_here = segment.done_before(end)[name] - segment.done_before(segment.start)[name]
            units[segment.seq_len] = units.get(segment.seq_len, 0) + num_here
    return units


def _why_not_after(old: DataPosition, new: DataPosition) -> str:
    """Empty when `new` can have come out of `old` by training and edits."""
    if new.consumed < old.consumed or new.num_steps < old.num_steps:
        return f"it stands at unit {new.consumed}, before unit {old.consumed}"
    if new.edits[: len(old.edits)] != old.edits:
        return "the edits differ"
    trained = [segment for segment in old.segments if segment.start < old.consumed]
    for segment, same in zip_longest(trained, new.segments[: len(trained)]):
        if same is None or _nameless(segment) != _nameless(same):
            return f"its data from unit {segment.start} on is another"
    return _different_steps(old.stretches, new.stretches)


def _nameless(segment: Segment) -> Segment:
    """Version 1 has no names, and its source gets one when training goes on."""
    if segment.order_version != order_v1.ORDER_VERSION:
        return segment
    return replace(segment, sources=tuple(replace(source, name="") for source in segment.sources))


def _different_steps(old: tuple[Stretch, ...], new: tuple[Stretch, ...]) -> str:
    *whole, last = [stretch for stretch in old if stretch.num_steps or stretch.num_units] or [Stretch(0, 0, 0)]
    is_same = tuple(whole) == new[: len(whole)]
    if last.num_steps and is_same:
        grown = new[len(whole)]
        is_same = grown.global_batch_size == last.global_batch_size and grown.num_units >= last.num_units
    return "" if is_same else "its steps were of other sizes"


def _units(position: DataPosition, numbers: range) -> list[dict[str, Any]]:
    return [
        {"number": number, "source": unit.source, "epoch": unit.epoch, "index": unit.index}
        for number, unit in zip(numbers, position.units(numbers), strict=True)
    ]


def _segment(segment: Segment) -> dict[str, Any]:
    shares = dict(zip((source.name for source in segment.sources), segment.slots, strict=True))
    return {"start": segment.start, "phase": segment.phase, "seq_len": segment.seq_len, "slots": shares}
