"""--overwrite replaces models, never what is being read, never anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli.main import run
from ckptool.errors import TargetExistsError, UsageError
from ckptool.storage.staging import create_staging


def model(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"a": torch.full((3, 2), value)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for value in (1.0, 2.0):
        model(tmp_path / f"source-{value:.0f}", value)
    ckptool.import_hf(str(tmp_path / "source-1"), "base", root=tmp_path)
    return tmp_path


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"source-1", "source-2"}


def test_an_import_and_its_exports_are_replaced(root: Path) -> None:
    for to in ("hf", "torch"):
        ckptool.export("base", to=to, root=root)
    assert run(["import-hf", str(root / "source-2"), "base", "--root", str(root)]) == 6
    assert run(["import-hf", str(root / "source-2"), "base", "--root", str(root), "--overwrite", "-q"]) == 0
    for to in ("hf", "torch"):
        assert run(["export", "base", "--to", to, "--root", str(root)]) == 6
        assert run(["export", "base", "--to", to, "--root", str(root), "--overwrite", "-q"]) == 0
    assert torch.equal(load_file(root / "base-hf" / "model.safetensors")["a"], torch.full((3, 2), 2.0))
    assert torch.equal(torch.load(root / "base.pt", weights_only=True)["model"]["a"], torch.full((3, 2), 2.0))
    assert names(root) == {"base", "base-hf", "base.pt"}


def test_what_is_read_is_not_replaced(root: Path) -> None:
    with pytest.raises(UsageError, match="read from it"):
        ckptool.export("base", root=root, out=root / "base", overwrite=True)
    with pytest.raises(UsageError, match="read from it"):
        ckptool.import_hf(str(root / "source-1" / "model.safetensors"), str(root / "source-1"), overwrite=True)
    assert names(root) == {"base"} and len(ckptool.open_checkpoint(root / "base").tensors) == 1


def test_other_folders_are_not_replaced(root: Path) -> None:
    (root / "home").mkdir()
    (root / "home" / "thesis.tex").write_text("years")
    with pytest.raises(TargetExistsError, match="without a model"):
        ckptool.export("base", root=root, out=root / "home", overwrite=True)
    assert (root / "home" / "thesis.tex").exists()


def test_ls_tells_the_living_from_the_dead(root: Path) -> None:
    living = create_staging(root / "step-1")
    (root / ".step-2.staging").mkdir()
    reasons = {summary.name: summary.reason for summary in ckptool.list_checkpoints(root)}
    assert reasons[".step-1.staging"].startswith("being written by process")
    assert reasons[".step-2.staging"] == "unfinished: not published"
    owner_file = living.lock.folder / living.lock.owner.file_name
    owner_file.rename(owner_file.with_name(owner_file.name.replace(f",{living.lock.owner.started},", ",1,")))
    reasons = {summary.name: summary.reason for summary in ckptool.list_checkpoints(root)}
    assert reasons[".step-1.staging"].endswith("which is gone")


def test_a_target_being_written_is_refused_with_exit_code_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    living = create_staging(root / "new")
    assert run(["import-hf", str(root / "source-1"), "new", "--root", str(root)]) == 1
    assert "belongs to process" in capsys.readouterr().err
    living.discard()
    assert names(root) == {"base"}
