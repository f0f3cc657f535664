"""The record of a DataPosition, read back: canonical JSON of version 2, or of version 1 from older checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ckptool.core import order, order_v1
from ckptool.core.data_source import DataSource
from ckptool.core.history import NOTHING, UNKNOWN
from ckptool.core.mixture import BLOCK_SLOTS
from ckptool.core.position import RECORD_VERSION, DataPosition, Edit, Stretch
from ckptool.core.segment import Segment
from ckptool.errors import DamagedError

#: The name of a version 1 record's one source, until the data that goes on with it says another.
UNNAMED = "data"

_LIMIT = 1 << 63


def parse(text: str, location: str, num_steps: int | None = None) -> DataPosition:
    """The position that `text` records; `num_steps` is what a version 1 record lacks.

    Raises DamagedError, naming `location`, for a missing, mistyped or impossible field.
    """
    try:
        record = json.loads(text)
        version = record.get("record_version", 1)
        if version == 1:
            return _version_1(record, num_steps)
        if version == RECORD_VERSION:
            return _version_2(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{location}: not a data position: {error!r}") from error
    raise DamagedError(
        f"{location}: a data position of version {version!r}, which this ckptool doesn't know",
        hint="pip install -U ckptool",
    )


def _version_1(record: dict[str, Any], num_steps: int | None) -> DataPosition:
    described = {"name": UNNAMED, "num_units": record["num_units"], "fingerprint": record["fingerprint"]}
    segment = Segment(
        start=0,
        sources=(DataSource.from_record(described),),
        slots=(BLOCK_SLOTS,),
        seq_len=_count(record["seq_len"]),
        seed=_seed(record["seed"]),
        order_version=_count(record["order_version"]),
    )
    _check(segment.order_version == order_v1.ORDER_VERSION, "order_version is not 1")
    consumed, batch_size = _count(record["consumed"]), _count(record["global_batch_size"], 1)
    if num_steps is None:
        num_steps = consumed // batch_size
    is_exact = num_steps * batch_size == consumed
    past = Stretch(consumed, num_steps, batch_size if is_exact else 0)
    stretches = (past,) if is_exact else (past, Stretch(0, 0, batch_size))
    return DataPosition((segment,), stretches, history=UNKNOWN if consumed else NOTHING)


def _version_2(record: dict[str, Any]) -> DataPosition:
    position = DataPosition(
        segments=_each(record["segments"], _segment),
        stretches=_each(record["stretches"], _stretch),
        history=record["history"],
        edits=_each(record["edits"], _edit),
    )
    starts = [segment.start for segment in position.segments]
    _check(bool(starts) and starts[0] == 0 and all(a < b for a, b in pairwise(starts)), "segments out of order")
    _check(bool(position.stretches) and position.global_batch_size > 0, "no stretches")
    _check(position.consumed == _count(record["consumed"]), "consumed is not what the stretches add up to")
    is_digest = bool(re.fullmatch(f"[0-9a-f]{{{len(NOTHING)}}}", position.history))
    _check(is_digest or position.history == UNKNOWN, "history is no digest")
    return position


def _segment(record: dict[str, Any]) -> Segment:
    segment = Segment(
        start=_count(record["start"]),
        sources=_each(record["sources"], DataSource.from_record),
        slots=_each(record["slots"], lambda slots: _count(slots, 1)),
        seq_len=_count(record["seq_len"]),
        seed=_seed(record["seed"]),
        done={_text(name): _count(number) for name, number in record["done"].items()},
        phase=_count(record["phase"]),
        order_version=_count(record["order_version"]),
    )
    names = [source.name for source in segment.sources]
    _check(names == sorted(set(names)) and len(names) == len(segment.slots) > 0, "sources without name or share")
    _check(sum(segment.slots) == BLOCK_SLOTS, f"shares that are not {BLOCK_SLOTS} together")
    _check(segment.order_version in (order_v1.ORDER_VERSION, order.ORDER_VERSION), "an unknown order_version")
    _check(segment.order_version != order_v1.ORDER_VERSION or len(names) == 1, "a mixture in order version 1")
    return segment


def _stretch(record: dict[str, Any]) -> Stretch:
    stretch = Stretch(_count(record["num_units"]), _count(record["num_steps"]), _count(record["global_batch_size"]))
    size = stretch.global_batch_size
    _check(size == 0 or stretch.num_steps * size == stretch.num_units, "steps and units that don't agree")
    return stretch


def _edit(record: dict[str, Any]) -> Edit:
    texts = {key: _text(record[key], may_be_empty=True) for key in ("action", "when", "reason")}
    changes = _each(record["changes"], lambda change: _text(change, may_be_empty=True))
    return Edit(unit=_count(record["unit"]), step=_count(record["step"]), changes=changes, **texts)


def _each(records: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    _check(type(records) is list, f"{records!r:.80} is no list")
    return tuple(read(record) for record in records)


def _count(value: Any, minimum: int = 0) -> int:
    _check(type(value) is int and minimum <= value < _LIMIT, f"{value!r:.80} is no number of its kind")
    return value


def _seed(value: Any) -> int:
    _check(type(value) is int and abs(value) <= 1 << 64, f"{value!r:.80} is no seed")
    return value


def _text(value: Any, may_be_empty: bool = False) -> str:
    _check(type(value) is str and (may_be_empty or bool(value)), f"{value!r:.80} is no text")
    return value


def _check(is_right: bool, fault: str) -> None:
    if not is_right:
        raise ValueError(fault)
