"""What an interrupted writer had already brought to the disk: JSON lines, the first one says of what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

JOURNAL_PATTERN = "journal-*.jsonl"


class Journal:
    """The journal of one rank, in `folder`. A line counts once it is on the disk."""

    def __init__(self, folder: Path, key: str, rank: int = 0) -> None:
        """`key` stands for the work: the same source, options and plan have the same one."""
        self._path = folder / f"journal-{rank}.jsonl"
        self._key = key

    def append(self, record: dict[str, Any]) -> None:
        """Add a record and flush it. Raises OSError."""
        with self._path.open("a", encoding="utf-8") as file:
            lines = [] if file.tell() else [{"key": self._key}]
            file.writelines(json.dumps(line) + "\n" for line in [*lines, record])
            file.flush()
            os.fsync(file.fileno())


def read_journals(folder: Path, key: str) -> list[dict[str, Any]]:
    """All ranks' records of the work `key` in `folder`; a line that was cut short ends its file."""
    records: list[dict[str, Any]] = []
    for path in sorted(folder.glob(JOURNAL_PATTERN)):
        lines = list(_whole_lines(path))
        if lines and lines[0].get("key") == key:
            records += lines[1:]
    return records


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return [line for line in lines if isinstance(line, dict)]
