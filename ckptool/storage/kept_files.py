"""The files that an interrupted writer had finished, by its journal: found, checked, and the rest removed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from ckptool.core.parts import FileRecord
from ckptool.errors import CkptoolError
from ckptool.storage.digest import digest_file
from ckptool.storage.files import os_errors, safe_join
from ckptool.storage.journal import JOURNAL_PATTERN, Journal, read_journals


def kept_files(content: Path, key: str) -> dict[str, FileRecord]:
    """The files of the work `key` in `content`, whose journal is beside it; each is read back and found whole."""
    whole: dict[str, FileRecord] = {}
    for line in read_journals(content.parent, key):
        with contextlib.suppress(KeyError, TypeError, ValueError, CkptoolError):
            record = FileRecord.from_json(line)
            path = safe_join(content, record.file)
            size_fits = path.is_file() and path.stat().st_size == record.num_bytes
            if size_fits and digest_file(path) == record.blake3:
                whole[record.file] = record
    return whole


def remove_rest(content: Path, key: str, kept: Collection[FileRecord]) -> None:
    """Remove all other files, and write the journal anew, so that it holds nothing but these. Raises StorageError."""
    names = {record.file for record in kept}
    with os_errors(content):
        for path in [*content.parent.glob(JOURNAL_PATTERN), *sorted(content.rglob("*"), reverse=True)]:
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif not path.is_relative_to(content) or path.relative_to(content).as_posix() not in names:
                path.unlink()
        journal = Journal(content.parent, key)
        for record in kept:
            journal.append(record.to_json())
