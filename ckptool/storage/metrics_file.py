"""Reading a run's `metrics.jsonl`: a JSON object a line, by a writer that may die any time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ckptool.errors import DamagedError, UsageError
from ckptool.storage.files import open_regular, os_errors

METRICS_FILE = "metrics.jsonl"
_MAX_LINE_BYTES = 1 << 20


def read_metric(path: Path, metric: str) -> dict[int, float]:
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


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every record, in the order of writing. A torn line is passed over; other lines than objects are DamagedError."""
    with os_errors(path), open(open_regular(path), "rb") as file:
        while raw := _next_line(file, path):
            record = _parse(raw, path)
            if record is not None:
                yield record


class MetricsTail:
    """Reads what is added to the file, time after time. A line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """The records of the lines finished since the last call; all of them when the file was written anew."""
        records = []
        with os_errors(self.path), open(open_regular(self.path), "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while (raw := _next_line(file, self.path)).endswith(b"\n"):
                self._offset += len(raw)
                record = _parse(raw, self.path)
                if record is not None:
                    records.append(record)
        return records


def _next_line(file: BinaryIO, path: Path) -> bytes:
    raw = file.readline(_MAX_LINE_BYTES)
    if len(raw) == _MAX_LINE_BYTES:
        raise DamagedError(f"{path}: a line of more than {_MAX_LINE_BYTES} bytes")
    return raw


def _parse(raw: bytes, path: Path) -> dict[str, Any] | None:
    """The record of a line, None for a torn one."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        raise DamagedError(f"{path}: a line that is no record of a step")
    return record
