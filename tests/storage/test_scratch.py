"""Folders for temporary files: what killed processes leave is removed by the next one, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ckptool.storage import scratch
from ckptool.storage.lock import Owner
from ckptool.storage.scratch import scratch_folder

_KILLED = """
import os, signal, sys
from pathlib import Path
from ckptool.storage.scratch import scratch_folder
folder = scratch_folder()
Path(folder.name, "weights").write_bytes(bytes(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, not looked at yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scratch._sweep.cache_clear()
    return tmp_path


def left_by(owner: Owner, top: Path, name: str) -> Path:
    folder = top / name
    folder.mkdir()
    (folder / "weights").touch()
    (folder / owner.file_name).touch()
    return folder


def test_what_a_killed_process_left_goes_with_the_next_one(top: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED], env={**os.environ, "TMPDIR": str(top)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = top.iterdir()
    assert (left / "weights").exists()
    with scratch_folder() as folder:
        assert [str(path) for path in top.iterdir()] == [folder]
    assert not any(top.iterdir())


def test_folders_of_the_living_of_others_and_of_nobody_stay(top: Path) -> None:
    here = Owner.this_process()
    gone = replace(here, started="0")
    kept = {
        left_by(here, top, "ckptool-living"),
        left_by(replace(here, host="elsewhere", pid_namespace="another"), top, "ckptool-elsewhere"),
        left_by(gone, top, "another-program"),
        top / "ckptool-without-owner",
        top / "ckptool-link",
    }
    (top / "ckptool-without-owner").mkdir()
    (top / "ckptool-link").symlink_to(top / "another-program")
    left_by(gone, top, "ckptool-dead")
    with scratch_folder() as folder:
        assert set(top.iterdir()) == {*kept, Path(folder)}
    assert (top / "another-program" / "weights").exists()


def test_what_another_machine_left_goes_after_a_week(top: Path) -> None:
    folder = left_by(replace(Owner.this_process(), host="elsewhere", pid_namespace="another"), top, "ckptool-old")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, 0))
    with scratch_folder():
        assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of another user")
def test_another_users_folder_stays(top: Path) -> None:
    folder = left_by(replace(Owner.this_process(), started="0"), top, "ckptool-theirs")
    os.chown(folder, 65534, 65534)
    with scratch_folder():
        assert (folder / "weights").exists()
