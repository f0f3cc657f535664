"""One run at a time in a root: a second one waits for the first, or is refused before it trains."""

import os
import signal
import threading

import pytest

import ckptool
from ckptool import LockedError
from tests.spawn import run_ranks
from tests.trainer.tiny import run
from trainer import rendezvous, sole_run


def test_a_run_waits_for_another_that_is_ending(root, capsys):
    other = ckptool.hold_root(root)
    threading.Timer(0.5, other.release).start()
    assert len(run(root, steps=1)) == 1
    said = capsys.readouterr().err
    assert "waiting up to 6 minutes: another run has" in said and "rm -r" in said
    assert not (root / ".run.lock").exists()


def test_a_run_beside_another_is_refused_before_it_trains(root, monkeypatch):
    monkeypatch.setattr(sole_run, "WAIT_SECONDS", 0.5)
    other = ckptool.hold_root(root)
    with pytest.raises(LockedError, match="another run has"):
        run(root, steps=1)
    assert not (root / "metrics.jsonl").exists()
    other.release()


def lives_of_a_job(rank, root, is_held_by_it):
    """A life of the job that dies while it, or another run, holds the root; how many steps the next life trains."""
    lock = ckptool.hold_root(root)
    if is_held_by_it:
        rendezvous.remember(sole_run._HOLDER, lock.name)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    sole_run.WAIT_SECONDS = 0.5
    return len(run(root, steps=1))


def test_ranks_that_torchrun_starts_again_go_on_at_once(root):
    assert run_ranks(1, lives_of_a_job, root, True) == [1]


def test_ranks_that_were_refused_and_start_again_do_not_take_the_root_of_another_run(root):
    with pytest.raises(RuntimeError, match="another run has"):
        run_ranks(1, lives_of_a_job, root, False)


def test_a_run_that_waits_ends_when_it_is_told_to(root):
    other = ckptool.hold_root(root)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(LockedError, match="another run has"):
        run(root, steps=1)
    other.release()
