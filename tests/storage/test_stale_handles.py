"""A file server that has started anew calls open files stale: they are opened again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import StorageError
from ckptool.storage import files
from ckptool.storage.digest import digest_file
from ckptool.storage.files import RangeReader, read_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_STALE_WAITS_SECONDS", (0.0, 0.0))
    (tmp_path / "data").write_bytes(bytes(range(100)))
    return tmp_path


def stale(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """The next calls of os.NAME find a stale handle."""
    left = [errno.ESTALE] * times
    original = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        if left:
            raise OSError(left.pop(), "Stale file handle")
        return original(*args, **options)

    monkeypatch.setattr(os, name, call)


def test_a_stale_handle_is_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RangeReader(folder)
    assert reader.read("data", 0, 10) == bytes(range(10))
    stale(monkeypatch, "preadv", 2)
    assert reader.read("data", 90, 10) == bytes(range(90, 100))
    reader.close()
    stale(monkeypatch, "open", 2)
    assert read_bytes(folder / "data", 100) == bytes(range(100))
    digest = digest_file(folder / "data")
    stale(monkeypatch, "fstat", 1)
    assert digest_file(folder / "data") == digest


def test_one_that_stays_stale_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale(monkeypatch, "preadv", 9)
    with pytest.raises(StorageError, match="Stale file handle"):
        RangeReader(folder).read("data", 0, 10)
