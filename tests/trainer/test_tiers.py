from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptool import StorageError, UsageError
from tests.trainer import tiny
from trainer import tiers
from trainer.metrics import Log


@pytest.mark.parametrize("program", ["print('half of', flush=True)", "raise SystemExit(1)"])
def test_a_run_does_not_wait_for_an_upload_that_never_answers(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_PROGRAM", program)
    config = tiny.tiny_config(tmp_path, steps=1, upload_to=str(tmp_path / "there"))
    uploads = tiers.Uploads(config, Log(tmp_path, 0), ())
    uploads.offer(tmp_path / "step-1")
    with pytest.raises(StorageError, match=r"step-1 was not brought to .*has died"):
        uploads.finish()


def test_nor_for_one_that_could_not_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers.sys, "executable", str(tmp_path / "absent"))
    uploads = tiers.Uploads(
        tiny.tiny_config(tmp_path, steps=1, upload_to=str(tmp_path / "there")), Log(tmp_path, 0), ()
    )
    uploads.offer(tmp_path / "step-1")
    with pytest.raises(StorageError, match=r"step-1 was not brought to .*FileNotFoundError"):
        uploads.finish()


def test_another_runs_checkpoint_in_the_second_place_is_no_copy_of_this_ones(root: Path, tmp_path: Path) -> None:
    other, there = tmp_path / "other", tmp_path / "there"
    shutil.copytree(root, other)
    tiny.run(other, steps=1, lr=0.1, upload_to=str(there))
    tiny.run(root, steps=1)
    assert tiers._copy(str(other / "step-1"), str(there / "step-1"), 0) == ""
    assert "another run's checkpoint" in tiers._copy(str(root / "step-1"), str(there / "step-1"), 0)


def test_what_was_on_its_way_at_the_last_save_is_pruned_too(root: Path, tmp_path: Path) -> None:
    tiny.run(root, steps=3, save_every=1, keep_last=1, upload_to=str(tmp_path / "there"))
    assert [path.name for path in root.glob("step-*")] == ["step-3"]


def test_the_root_is_no_second_place(root: Path) -> None:
    with pytest.raises(UsageError, match="and it is the root"):
        tiny.run(root, steps=1, upload_to=f"{root}/../{root.name}")
