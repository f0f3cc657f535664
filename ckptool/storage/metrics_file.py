"""Reading a run's `metrics.jsonl`: a JSON object a line, by a writer that may die any time."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

from ckptool.errors import DamagedError, NotFoundError, UsageError
from ckptool.storage.files import Place, open_binary, os_errors
from ckptool.storage.store_path import StorePath

METRICS_FILE = "metrics.jsonl"
_MAX_LINE_BYTES = 1 << 20


def read_metric(path: Place, metric: str) -> dict[int, float]:
    """The value of `metric` at each step; a step that was trained twice has its last value. NaN counts as no value.

    A torn line, as a killed writer leaves, is passed over. Raises DamagedError for a line that is something else than
    a record of a step, UsageError when no line has the metric.
    """
    values: dict[int, float] = {}
    others: set[str] = set()
    for record in read_records(path):
        step, value = record.get("step"), record.get(metric)
        if type(step) is not int:
            raise DamagedError(f"{path}: a line without a step")
        others.update(name for name, number in record.items() if isinstance(number, float))
        if value is None:
            continue
        if type(value) not in (int, float):
            raise DamagedError(f"{path}: {metric} of step {step} is no number")
        values.pop(step, None)
        if math.isfinite(value):
            values[step] = float(value)
    if not values:
        raise UsageError(f"{path}: no step has a {metric!r}", hint=f"there: {', '.join(sorted(others)[:10]) or 'none'}")
    return values


def read_records(path: Place) -> Iterator[dict[str, Any]]:
    """Every record, in the order of writing. A torn line is passed over; other lines than objects are DamagedError."""
    with os_errors(path), open_binary(path) as file:
        while raw := _next_line(file, path):
            record = _parse(raw, path)
            if record is not None:
                yield record


class MetricsTail:
    """Reads what is added to the file, time after time. A line that is still being written waits for its end."""

    def __init__(self, path: Place) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """The records of the lines finished since the last call; all of them when the file was written anew.

        Of a store's file, those that were there when the store was listed last.
        """
        records = []
        with os_errors(self.path), open_binary(self.path) as file:
            if file.seek(0, io.SEEK_END) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while (raw := _next_line(file, self.path)).endswith(b"\n"):
                self._offset += len(raw)
                record = _parse(raw, self.path)
                if record is not None:
                    records.append(record)
        return records


def _next_line(file: BinaryIO, path: Place) -> bytes:
    raw = file.readline(_MAX_LINE_BYTES)
    if len(raw) == _MAX_LINE_BYTES:
        raise DamagedError(f"{path}: a line of more than {_MAX_LINE_BYTES} bytes")
    return raw


def _parse(raw: bytes, path: Place) -> dict[str, Any] | None:
    """The record of a line, None for a torn one."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        raise DamagedError(f"{path}: a line that is no record of a step")
    return record


def find_metrics(root: Place, work_dir: Place | None) -> Place:
    """The file of the run in `root`, which a run with its root in a store has in its work folder.

    Raises NotFoundError.
    """
    path = (root if work_dir is None else work_dir) / METRICS_FILE
    if not path.is_file():
        hint = "give the root of a run; the trainer writes the file with its first step"
        if isinstance(root, StorePath) and work_dir is None:
            hint = "the trainer writes it into its work folder: --work-dir DIR"
        raise NotFoundError(f"{path.parent} has no {METRICS_FILE}: no run is going on there", hint=hint)
    return path
