from __future__ import annotations

from pathlib import Path

import pytest

from ckptool import StorageError
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
