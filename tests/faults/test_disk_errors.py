"""A disk that refuses: one clear error, nothing under the final name, what was there before is unharmed."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError
from ckptool.ops.conversion import GOES_ON
from ckptool.storage.staging import is_staging
from tests.faults.scenarios import NAME, SCENARIOS, make_model, save, state_of
from tests.faults.shim import Shim, run_forked

EXPECTED = {
    "ENOSPC": "no space left",
    "EIO": "Input/output error",
    "EROFS": "read-only file system",
    "EACCES": "permission denied",
}


def one_line(shim: Shim, error: BaseException | None) -> str:
    if error is None:
        return f"done {shim.count}"
    if not isinstance(error, CkptoolError):
        return f"{type(error).__name__}: {error}\n"
    return f"{error} ({error.hint})"


@pytest.mark.parametrize(
    "fault", ["ENOSPC", "EIO", *(pytest.param(name, marks=pytest.mark.slow) for name in ("EROFS", "EACCES"))]
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_operation(name: str, fault: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    template, root = tmp_path / "template", tmp_path / "root"
    scenario.prepare(template)
    old = state_of(template)
    shutil.copytree(template, root)
    scenario.run(root)
    new = state_of(root)

    def attempt(at: int) -> str:
        shutil.rmtree(root)
        shutil.copytree(template, root)
        return run_forked(lambda: scenario.run(root), Shim(at, fault), one_line)

    num_operations = int(attempt(0).removeprefix("done "))
    for at in (*range(1, 6), *range(6, num_operations + 1, 16)):
        said = attempt(at)
        if said.startswith("done"):  # only what was left to remove could not be removed
            assert state_of(root) == new
        else:
            assert EXPECTED[fault] in said and "\n" not in said, f"{fault} at {at}: {said}"
            assert state_of(root) in (old, new), f"{fault} at {at}"
            if fault == "ENOSPC":  # what is left is what the next attempt goes on from
                left = [path for path in root.iterdir() if is_staging(path)]
                assert all(list(path.glob("content-*/journal-*.jsonl")) for path in left), f"{fault} at {at}"
                assert (GOES_ON in said) == bool(left), f"{fault} at {at}: {said}"
            if state_of(root) == old:
                scenario.run(root)
                assert [path for path in root.iterdir() if is_staging(path)] == [], f"{fault} at {at}"
                assert state_of(root) == new, f"{fault} at {at}"


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"can't mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=300k", "tmpfs") as root:
        make_model(root)
        save(root, 1.0)
        before = state_of(root)
        big = {"a": torch.ones(200_000)}
        for overwrite in (False, True):
            with pytest.raises(CkptoolError, match="no space left"):
                ckptool.save(
                    big,
                    root / (NAME if overwrite else "step-6"),
                    provenance=ckptool.Provenance("0"),
                    overwrite=overwrite,
                )
        assert state_of(root) == before
        assert sorted(path.name for path in root.iterdir()) == ["model", NAME]


def test_a_read_only_disk(tmp_path: Path) -> None:
    make_model(tmp_path)
    save(tmp_path, 1.0)
    with mounted(tmp_path / "view", "--bind", str(tmp_path)) as view:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(view)], check=True)
        with pytest.raises(CkptoolError, match="read-only file system"):
            ckptool.import_hf(str(tmp_path / "model"), "base", root=view)
        with pytest.raises(CkptoolError, match="read-only file system"):
            save(view, 2.0, overwrite=True)
        assert state_of(view) == state_of(tmp_path) != "absent"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(CkptoolError, match="permission denied"):
        ckptool.import_hf(str(tmp_path / "model"), "base", root=tmp_path / "closed")


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """The kernel's own refusal, in the middle of a write."""

    def save_big() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        ckptool.save({"a": torch.ones(200_000)}, tmp_path / NAME, provenance=ckptool.Provenance("0"))

    assert "File too large" in run_forked(save_big, Shim(), one_line)
    assert list(tmp_path.iterdir()) == []
