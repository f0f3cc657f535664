"""One run at a time in a root: a second one waits for the first, or is refused before it trains."""

import os
import signal
import threading

import pytest

import ckptool
from ckptool import LockedError
from tests.trainer.tiny import run
from trainer import sole_run


def test_a_run_waits_for_another_that_is_ending(root, capsys):
    other = ckptool.hold_root(root)
    threading.Timer(0.5, other.release).start()
    assert len(run(root, steps=1)) == 1
    assert "waiting: another run has" in capsys.readouterr().err
    assert not (root / ".run.lock").exists()


def test_a_run_beside_another_is_refused_before_it_trains(root, monkeypatch):
    monkeypatch.setattr(sole_run, "WAIT_SECONDS", 0.5)
    other = ckptool.hold_root(root)
    with pytest.raises(LockedError, match="another run has"):
        run(root, steps=1)
    assert not (root / "metrics.jsonl").exists()
    other.release()


def test_ranks_that_torchrun_starts_again_go_on_at_once(root, monkeypatch):
    ckptool.hold_root(root)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len(run(root, steps=1)) == 1


def test_a_run_that_waits_ends_when_it_is_told_to(root):
    other = ckptool.hold_root(root)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(LockedError, match="another run has"):
        run(root, steps=1)
    other.release()
