"""The trainer's own pruning: after a save is on the disk, never before, and never a reason to stop."""

import shutil

import pytest

import ckptool
from ckptool.storage.staging import create_staging
from tests.ops.test_prune import die_while_writing
from tests.trainer.tiny import run
from trainer import checkpoint


def kept(root):
    return [summary.name for summary in ckptool.list_checkpoints(root) if summary.name.startswith("step-")]


def test_the_run_keeps_what_it_was_told_to(root):
    run(root, steps=5, save_every=1, keep_last=2, keep_every=3)
    assert kept(root) == ["step-3", "step-4", "step-5"]
    assert (root / "base").is_dir()


def test_what_a_killed_save_left_goes_too_and_what_lives_stays(root):
    die_while_writing(root / "step-77")
    die_while_writing(root / "step-2-hf")
    run(root, steps=2, save_every=1)
    assert (root / ".step-77.staging").exists()  # nothing is pruned without being asked for
    run(root, steps=3, keep_last=1)
    assert not (root / ".step-77.staging").exists()
    assert (root / ".step-2-hf.staging").exists()


def test_what_the_run_resumed_from_stays_while_it_runs_and_exports_stay_whole(root):
    run(root, steps=2)
    run(root, steps=5, save_every=1, keep_last=1)
    assert kept(root) == ["step-2", "step-5"]
    assert (root / "step-5" / "hf" / "config.json").exists()


def test_field_report_7_a_save_that_fails_prunes_nothing(root):
    """A newer checkpoint must be on the disk before an older one goes: here another writer holds the name."""
    run(root, steps=2, save_every=1)
    other = create_staging(root / "step-3")
    with pytest.raises(ckptool.CkptoolError, match="step-3"):
        run(root, steps=3, keep_last=1)
    assert kept(root) == ["step-1", "step-2"]
    other.discard()
    run(root, steps=3, keep_last=1)
    assert kept(root) == ["step-2", "step-3"]  # step-2 is what this run resumed from


def test_an_error_in_pruning_is_said_and_does_not_stop_the_run(root, capsys):
    run(root, steps=2, save_every=1)
    (root / "elsewhere").mkdir()
    (root / "step-1").rename(root / "elsewhere" / "step-1")
    (root / "step-1").symlink_to(root / "elsewhere" / "step-1")
    run(root, steps=3, keep_last=1)
    assert "step-1 was not removed" in capsys.readouterr().err
    assert kept(root) == ["step-1", "step-2", "step-3"]


def test_side_files_outlive_the_checkpoint_that_the_run_began_from(root, monkeypatch):
    """Somebody removes the origin during the run: the next save takes its side files from the last one."""
    save = checkpoint.save

    def save_then_lose_the_origin(state, origin, *rest):
        seconds = save(state, origin, *rest)
        shutil.rmtree(origin.path, ignore_errors=True)
        return seconds

    monkeypatch.setattr(checkpoint, "save", save_then_lose_the_origin)
    run(root, steps=3, save_every=1)
    assert (root / "step-3" / "hf" / "config.json").read_bytes() == (
        root / "step-1" / "hf" / "config.json"
    ).read_bytes()
