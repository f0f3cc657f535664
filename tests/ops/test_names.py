"""A bare name means the root's checkpoint, also beside a model of the same name in the folder where one works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptool.cli.main import run
from ckptool.ops.diff import diff
from ckptool.ops.verify import verify


@pytest.fixture
def beside(kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `tiny`, a Hugging Face folder, and `ckpt/tiny`, a checkpoint of another model."""
    shutil.copytree(kinds / "tiny-hf", tmp_path / "tiny")
    shutil.copytree(kinds / "moe", tmp_path / "ckpt" / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verify_and_diff_look_at_the_checkpoint(beside: Path) -> None:
    assert verify("tiny").target == "ckpt/tiny"
    assert verify("./tiny").target == "tiny"
    assert verify("tiny", against="./tiny").exit_code == 3
    assert diff("tiny", "./tiny").exit_code == 3


def test_half_a_checkpoint_is_not_passed_over_for_the_model(beside: Path) -> None:
    (beside / "ckpt" / "tiny" / ".metadata").unlink()
    found = verify("tiny")
    assert (found.exit_code, found.target) == (4, "ckpt/tiny")


def test_a_model_is_found_where_the_root_has_no_checkpoint_of_that_name(beside: Path) -> None:
    shutil.rmtree(beside / "ckpt" / "tiny")
    assert verify("tiny").exit_code == 0


@pytest.mark.parametrize(
    "command", [["prune", "", "--stale", "--yes"], ["import-hf", "", "x"], ["verify", ""], ["ls", ""]]
)
def test_an_empty_name_is_not_the_folder_where_one_works(
    beside: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """As of a variable of a script that was not set."""
    assert run(command) == 2
    assert capsys.readouterr().err.startswith("error: a name is empty\nhint: ")
