"""Reading over HTTP, from a server that breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptool
from ckptool.errors import CkptoolError, DamagedError
from ckptool.ops.copy import copy
from ckptool.storage.store import Store
from tests.stores.servers import FolderServer


def test_a_checkpoint_is_read_in_ranges(web: FolderServer, root: Path) -> None:
    assert ckptool.diff(f"{web.url}/step-5", str(root / "step-5")).equal
    assert ckptool.verify(f"{web.url}/step-5").exit_code == 0


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_answers_that_fail_are_asked_for_again(web: FolderServer, root: Path, tmp_path: Path, fault: str) -> None:
    web.fault = lambda number: fault if number < 5 else ""  # fewer than attempts, whichever requests they hit
    copy(f"{web.url}/step-5", str(tmp_path / "here"))
    assert ckptool.diff(str(tmp_path / "here"), str(root / "step-5")).equal


def test_a_server_that_only_fails_ends_in_one_line(web: FolderServer, tmp_path: Path) -> None:
    web.fault = lambda number: "503"
    with pytest.raises(CkptoolError, match=r"the store failed 6 times \(HTTP 503\)"):
        copy(f"{web.url}/step-5", str(tmp_path / "here"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_under_the_reader_is_an_error(web: FolderServer, tmp_path: Path) -> None:
    web.folder = tmp_path
    (tmp_path / "data").write_bytes(b"first")
    source = Store(web.url)
    assert source.file("data").num_bytes == 5
    (tmp_path / "data").write_bytes(b"other")
    with pytest.raises(DamagedError, match="changed while it was read"):
        source.read_into("data", 0, memoryview(bytearray(5)))
