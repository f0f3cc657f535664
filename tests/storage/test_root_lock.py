"""A folder of checkpoints is held by one living process."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import pytest

import ckptool
from ckptool import LockedError


def hold_and_die(root: Path, is_released: bool) -> None:
    lock = ckptool.hold_root(root)
    if is_released:
        lock.release()
    os._exit(0)


def hold_and_wait(root: Path, held: multiprocessing.synchronize.Event, over: multiprocessing.synchronize.Event) -> None:
    ckptool.hold_root(root)
    held.set()
    over.wait(60)
    os._exit(0)


@pytest.mark.parametrize("is_released", [True, False])
def test_what_a_run_has_let_go_of_or_died_with_is_free(tmp_path: Path, is_released: bool) -> None:
    other = multiprocessing.get_context("spawn").Process(target=hold_and_die, args=(tmp_path / "root", is_released))
    other.start()
    other.join()
    assert other.exitcode == 0
    ckptool.hold_root(tmp_path / "root").release()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_living_run_is_named_and_may_be_replaced_by_its_own_restart(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, over = context.Event(), context.Event()
    other = context.Process(target=hold_and_wait, args=(tmp_path, held, over))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(LockedError, match=re.escape(f"another run has {tmp_path}: process {other.pid} on ")):
            ckptool.hold_root(tmp_path)
        with pytest.raises(LockedError, match="another run has"):
            ckptool.hold_root(tmp_path, gone="owner,of,another,1,2,lock")
        (holder,) = (tmp_path / ".run.lock").iterdir()
        ckptool.hold_root(tmp_path, gone=holder.name).release()
    finally:
        over.set()
        other.join()
