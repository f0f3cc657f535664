"""A run that saves beside its training is the same run, and is never ahead of what is on the disk."""

import json

import pytest

import ckptool
from tests.trainer.tiny import read_lines, run
from trainer import async_save, checkpoint
from trainer.async_save import Saves


def test_the_run_and_its_checkpoints_are_those_of_waiting_saves(root, tmp_path):
    waiting = run(root, steps=4, save_every=2)
    for name in ("step-2", "step-4", "metrics.jsonl"):
        (root / name).rename(tmp_path / name)
    beside = run(root, steps=4, save_every=2, async_save=True)
    assert [line["loss"] for line in beside] == [line["loss"] for line in waiting]
    for name in ("step-2", "step-4"):
        assert ckptool.diff(tmp_path / name, root / name).equal
        assert not ckptool.verify(root / name, level="content").findings
        record, expected = (json.loads((r / name / "data_position.json").read_text()) for r in (root, tmp_path))
        assert record == expected


def test_it_resumes_and_counts_what_saves_cost(root):
    run(root, steps=2, async_save=True)
    lines = run(root, steps=5, save_every=2, async_save=True)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert sum(line["checkpoint_seconds"] > 0 for line in lines) >= 2
    assert lines[-1]["checkpoint_seconds"] > 0
    assert all(line["checkpoint_stall_seconds"] > 0 for line in lines if line["step"] in (4, 5))


def test_old_checkpoints_go_only_when_the_new_one_is_durable(root, monkeypatch):
    seen = []
    prune = ckptool.prune

    def watched(*args, **options):
        seen.append(ckptool.find_latest(root).path.name)
        return prune(*args, **options)

    monkeypatch.setattr(ckptool, "prune", watched)
    run(root, steps=3, save_every=1, keep_last=1, async_save=True)
    assert seen == ["step-1", "step-2", "step-3"]
    assert sorted(path.name for path in root.glob("step-*")) == ["step-3"]


def test_the_error_of_a_save_ends_the_run_at_a_later_step(root, monkeypatch):
    save = checkpoint.save

    def save_without_side_files(state, origin, *rest):
        (origin.hf_folder / "config.json").unlink(missing_ok=True)
        for path in origin.hf_folder.iterdir():
            path.unlink()
        origin.hf_folder.rmdir()
        return save(state, origin, *rest)

    monkeypatch.setattr(async_save.checkpoint, "save", save_without_side_files)
    with pytest.raises(ckptool.NotFoundError, match="hf is gone"):
        run(root, steps=50, save_every=1, async_save=True)
    assert not list(root.glob("step-*"))
    assert len(read_lines(root / "metrics.jsonl")) < 50


def test_leaving_waits_for_the_disk(root, monkeypatch):
    monkeypatch.setattr(Saves, "finish", lambda self, state: None)
    run(root, steps=2, async_save=True)
    assert ckptool.find_latest(root).path.name == "step-2"
