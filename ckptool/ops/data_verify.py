"""Does a checkpoint's data position agree with itself, and were exactly its units trained?"""

from __future__ import annotations

from pathlib import Path

from ckptool.core.findings import Finding
from ckptool.core.history import UNKNOWN, add_histories, history_of
from ckptool.core.interfaces import Progress
from ckptool.core.position import DataPosition
from ckptool.errors import DamagedError, NotFoundError
from ckptool.ops.data_read import CURSOR, RECORD, StoredPosition, read_position
from ckptool.ops.verify import Verification
from ckptool.runs import POSITION_FILE
from ckptool.storage.files import read_json

_REPLAYED_AT_ONCE = 4096


def verify_position(
    name: str, *, root: Path | None = None, replay: bool = False, report: Progress | None = None
) -> Verification:
    """Compare all places where checkpoint `name` says how far its data was trained.

    `replay` computes the digest of every unit that the record implies, from the first one on, and compares it with the
    digest of what was fed. `report` is called with numbers of units.
    """
    stored = read_position(name, root)
    findings = _contradictions(stored)
    notes: list[str] = []
    position = stored.position
    if replay and position.history == UNKNOWN:
        notes.append("no history was recorded, or not from the first step on, so there is nothing to replay")
    elif replay and replayed_history(position, report) != position.history:
        message = f"the units that were fed are not the {position.consumed} units that the record implies"
        findings.append(Finding("corrupt", message, RECORD))
    details = {
        "consumed": position.consumed,
        "num_steps": position.num_steps,
        "history": position.history,
        "replayed": replay and position.history != UNKNOWN,
    }
    return Verification("data verify", str(stored.path), notes=tuple(notes), details=details, findings=tuple(findings))


def replayed_history(position: DataPosition, report: Progress | None = None) -> str:
    """The history that training exactly the units of `position` gives."""
    digests = []
    for start in range(0, position.consumed, _REPLAYED_AT_ONCE):
        numbers = range(start, min(start + _REPLAYED_AT_ONCE, position.consumed))
        digests.append(history_of(zip(numbers, position.units(numbers), strict=True)))
        if report:
            report(len(numbers))
    return add_histories(digests)


def _contradictions(stored: StoredPosition) -> list[Finding]:
    position = stored.position
    findings = []
    if list(stored.cursor) != position.cursor():
        message = f"{CURSOR} says {list(stored.cursor)}, {RECORD} {position.cursor()}"
        findings.append(Finding("corrupt", message, CURSOR))
    if stored.step is not None and stored.step != position.num_steps:
        message = f"the checkpoint has {stored.step} steps, its data position {position.num_steps}"
        findings.append(Finding("corrupt", message, RECORD))
    try:
        beside = read_json(stored.path / POSITION_FILE)
    except (NotFoundError, DamagedError) as error:
        findings.append(Finding("missing", str(error), file=POSITION_FILE))
    else:
        consumed = beside.get("consumed") if isinstance(beside, dict) else None
        if consumed != position.consumed:
            message = f"{POSITION_FILE} says {consumed} units, {RECORD} {position.consumed}"
            findings.append(Finding("corrupt", message, file=POSITION_FILE))
    return findings
