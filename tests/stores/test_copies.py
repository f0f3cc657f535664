"""Copies into S3: limited, of the model alone, many files at a time, and gone on from after a kill."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import fsspec
import pytest

import ckptool
from ckptool.errors import StorageError
from ckptool.ops.copy import copy
from ckptool.storage.store import Store

S3 = fsspec.AbstractFileSystem
URL = "s3://bucket/runs/step-5"


def _copy_and_die(root: str) -> None:
    """Killed in the middle, when some files are there."""
    original, sent = Store.put, []

    def put(self: Store, name: str, path: Path) -> object:
        if len(sent) >= 8:  # of four threads, each of which brings a file and then the record of it
            os._exit(9)
        made = original(self, name, path)
        sent.append(name)
        return made

    Store.put = put  # type: ignore[method-assign, assignment]
    copy("step-5", URL, root=Path(root))


def test_a_killed_copy_shows_nothing_and_the_next_goes_on(s3: S3, root: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_copy_and_die, args=(str(root),))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert s3.find("bucket/runs") and not s3.exists("bucket/runs/step-5/.metadata")
    assert ckptool.find_latest("s3://bucket/runs") is None
    result = copy("step-5", URL, root=root)
    assert any("went on from an interrupted attempt" in note for note in result.notes)
    assert ckptool.verify(URL, level="content", against=str(root / "step-5")).exit_code == 0


def test_the_model_alone_goes_up(s3: S3, root: Path) -> None:
    copy("step-5", "s3://bucket/model", root=root, model_only=True)
    assert ckptool.verify("s3://bucket/model", level="content", against=str(root / "step-5")).exit_code == 0


@pytest.mark.slow
def test_a_limited_copy_takes_its_time_in_both_directions(s3: S3, root: Path, tmp_path: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in (root / "step-5").rglob("*") if path.is_file())
    for source, target in ((str(root / "step-5"), URL), (URL, str(tmp_path / "back"))):
        start = time.monotonic()
        copy(source, target, max_bytes_per_s=num_bytes)
        assert time.monotonic() - start > 0.95
    assert ckptool.diff(str(tmp_path / "back"), str(root / "step-5")).equal


def test_what_fails_while_it_is_sent_slowly_is_sent_anew(
    s3: S3, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(os.urandom(3 << 20))
    store = Store("s3://bucket")
    store.limit_rate(1e9)
    taken: list[int] = []
    original = store._writes.take

    def take(num_bytes: int) -> None:
        taken.append(num_bytes)
        if len(taken) == 2:
            raise ConnectionError
        original(num_bytes)

    monkeypatch.setattr(store._writes, "take", take)
    assert store.put("data", tmp_path / "data").num_bytes == 3 << 20
    assert s3.cat("bucket/data") == (tmp_path / "data").read_bytes()


def test_a_copy_that_is_refused_says_what_to_do(s3: S3, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "put", lambda *args: (_ for _ in ()).throw(StorageError("no more")))
    with pytest.raises(StorageError, match="no more"):
        copy("step-5", URL, root=root)
    assert s3.find("bucket") == []
