from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.cli.main import run
from tests.test_architecture import heavy_modules_after


def test_copy_says_where_to_and_that_it_was_read_back(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b"
    assert run(["copy", "tiny", str(target), "--root", str(root), "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert run(["copy", "tiny", str(target), "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"copied to {target} (") and out.endswith(" s, read back)\n")
    assert run(["copy", "tiny", str(target), "--root", str(root)]) == 6
    assert run(["copy", "tiny", str(tmp_path / "c"), "--root", str(root), "--model-only", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'c'}\n"


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_note_is_said_once(
    dry_run: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["copy", "step-5", str(tmp_path / "b"), "--root", str(root), "--model-only", *dry_run]) == 0
    said = capsys.readouterr()
    assert (said.err + said.out).count("all tensors are taken for the model's") == 1


def test_copying_files_needs_no_torch(root: Path, tmp_path: Path) -> None:
    assert heavy_modules_after(["copy", "tiny", str(tmp_path / "b"), "--root", str(root)]) == ""
