"""Does a checkpoint's data position agree with itself, and were exactly its units trained?"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptool.core.data_source import DataSource
from ckptool.core.findings import Finding
from ckptool.core.history import NOTHING, UNKNOWN, add_histories, history_of
from ckptool.core.interfaces import Progress
from ckptool.core.position import DataPosition
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from ckptool.ops.data_read import StoredPosition, read_position
from ckptool.ops.verify import Verification
from ckptool.runs import POSITION_FILE
from ckptool.storage.data_files import files_record, find_source_files
from ckptool.storage.files import Place, read_json

_REPLAYED_AT_ONCE = 4096


def verify_position(
    name: str,
    *,
    root: Place | None = None,
    replay: bool = False,
    data: Mapping[str, str] | None = None,
    full: bool = False,
    report: Progress | None = None,
) -> Verification:
    """Compare all places where checkpoint `name` says how far its data was trained.

    `data` gives paths by source (the key "" for the only source): the number and sizes of the files there are compared
    with the source's fingerprint, and with `full` their contents, byte for byte. Raises UsageError for a source that
    the checkpoint doesn't have, UnsupportedError for one that isn't known by its files.

    `replay` computes the digest of every unit that the record implies, from the first one on, and compares it with the
    digest of what was fed. `report` is called with numbers of units.
    """
    stored = read_position(name, root)
    findings = _contradictions(stored)
    notes: list[str] = []
    position = stored.position
    # A loop that only advances its position, without counting what it feeds, leaves the digest of nothing.
    has_history = position.history != UNKNOWN and (position.history != NOTHING or position.consumed == 0)
    if replay and not has_history:
        notes.append("no history was recorded, or not from the first step on, so there is nothing to replay")
    elif replay and replayed_history(position, report) != position.history:
        message = f"the units that were fed are not the {position.consumed} units that the record implies"
        findings.append(Finding("corrupt", message, stored.record_fqn))
    for source_name, path in (data or {}).items():
        findings += _changed_files(_source(position, source_name), path, full)
    details = {
        "consumed": position.consumed,
        "data": sorted(data or {}),
        "num_steps": position.num_steps,
        "history": position.history,
        "replayed": replay and has_history,
    }
    return Verification("data verify", str(stored.path), notes=tuple(notes), details=details, findings=tuple(findings))


def _source(position: DataPosition, name: str) -> DataSource:
    sources = {source.name: source for source in position.segment.sources}
    if name == "" and len(sources) == 1:
        return next(iter(sources.values()))
    if name not in sources:
        raise UsageError(
            f"no source is called {name!r}" if name else "the checkpoint has several sources",
            hint=f"--data NAME=PATH, with a name of {', '.join(sources)}",
        )
    return sources[name]


def _changed_files(source: DataSource, path: str, full: bool) -> list[Finding]:
    """How the files at `path` differ from what a source's fingerprint has."""
    recorded = source.fingerprint
    if "files" not in recorded:
        raise UnsupportedError(
            f"the fingerprint of {source.name} has no files", hint="the trainer compares such a source when it resumes"
        )
    kind = str(recorded.get("kind", "files"))
    files = find_source_files(kind, tuple(path.split(os.pathsep)))
    if full:
        found = files_record(files, sampled=kind == "tokens")
    else:
        found = {"num_files": len(files), "num_bytes": sum(file.path.stat().st_size for file in files)}
    return [
        Finding("mismatched", f"{source.name}: {key} {recorded[key]} -> {value}", file=path)
        for key, value in found.items()
        if recorded.get(key, value) != value
    ]


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
        message = f"{stored.cursor_fqn} says {list(stored.cursor)}, {stored.record_fqn} {position.cursor()}"
        findings.append(Finding("corrupt", message, stored.cursor_fqn))
    if stored.step is not None and stored.step != position.num_steps:
        message = f"the checkpoint has {stored.step} steps, its data position {position.num_steps}"
        findings.append(Finding("corrupt", message, stored.record_fqn))
    try:
        beside = read_json(stored.path / POSITION_FILE)
    except NotFoundError as error:
        if stored.is_ours:
            findings.append(Finding("missing", str(error), file=POSITION_FILE))
    except DamagedError as error:
        findings.append(Finding("missing", str(error), file=POSITION_FILE))
    else:
        consumed = beside.get("consumed") if isinstance(beside, dict) else None
        if consumed != position.consumed:
            message = f"{POSITION_FILE} says {consumed} units, {stored.record_fqn} {position.consumed}"
            findings.append(Finding("corrupt", message, file=POSITION_FILE))
    return findings
