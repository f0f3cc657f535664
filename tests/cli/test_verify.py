"""Verify and diff at the command line: exit codes, one line for a good result, JSON, no torch where none is needed."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.main import run
from tests.test_architecture import heavy_modules_after


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    """A copy of the import with its last payload bit flipped."""
    folder = Path(shutil.copytree(root / "tiny", tmp_path / "tiny"))
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    return folder


def test_a_good_result_says_in_one_line_what_was_checked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "tiny", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{root / 'tiny'} is good: bytes of ")
    assert out.count("\n") == 1
    assert all(word in out for word in ("files", "21 tensors", "kB read in", "B/s"))


def test_findings_come_with_the_next_command(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(damaged)]) == 4
    output = capsys.readouterr()
    assert output.out.startswith("corrupt: __0_0.distcp at byte ")
    assert "next: ckptool " in output.err
    assert run(["verify", str(damaged), "--quiet"]) == 4
    assert capsys.readouterr().out == "__0_0.distcp\n"


def test_json_has_every_finding(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(damaged), "--json"]) == 4
    output = capsys.readouterr()
    result: Any = json.loads(output.out)
    assert (result["good"], len(result["findings"]), output.err) == (False, 1, "")
    assert set(result["findings"][0]) == {"kind", "message", "tensor", "file", "offset_bytes", "next_step"}


def test_a_difference_ends_with_3_and_hostile_metadata_with_5(
    root: Path, hub_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "tiny", "--against", str(hub_folder), "--root", str(root)]) == 0
    assert run(["verify", "tiny", "--against", "step-5", "--root", str(root)]) == 3
    assert "mismatched: " in capsys.readouterr().out
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / ".metadata").write_bytes(pickle.dumps(eval))
    assert run(["verify", str(hostile)]) == 5
    assert capsys.readouterr().out == ""


def test_structure_is_quick_and_needs_no_torch(root: Path) -> None:
    assert heavy_modules_after(["verify", "tiny", "--level", "structure", "--root", str(root)]) == ""
    start = time.perf_counter()
    assert run(["verify", "tiny", "--level", "structure", "--root", str(root)]) == 0
    assert time.perf_counter() - start < 1.0


def test_reading_bytes_needs_no_torch_either(root: Path) -> None:
    assert heavy_modules_after(["verify", "tiny", "--root", str(root)]) == ""
    assert heavy_modules_after(["verify", "step-5", "--root", str(root)]) == ""


def test_diff_ends_with_0_when_equal_and_3_when_not(
    root: Path, hub_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", "tiny", str(hub_folder), "--root", str(root)]) == 0
    assert capsys.readouterr().out == "equal: 20 of 20 compared tensors are equal\n"
    assert run(["diff", "tiny", "step-5", "--root", str(root), "--keys", "model.w"]) == 3
    assert capsys.readouterr().out.startswith("only in step-5: model.w\n")
    assert run(["diff", "tiny", "nothing", "--root", str(root)]) == 1


def test_diff_shows_the_rows_asked_for(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    for name, factor in (("a", 1.0), ("b", 2.0)):
        layers = {f"layers.{i}": {"w": torch.full((4,), factor + i), "b": torch.full((2,), factor)} for i in range(3)}
        dcp.save({"model": layers}, checkpoint_id=tmp_path / name, no_dist=True)
    args = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert run([*args, "--top", "2"]) == 3
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[1].split() == ["TENSOR", "DIFFERENT", "MAX", "ABS", "RELATIVE", "COSINE"]
    assert lines[2].split() == ["model.layers.0.w", "4", "of", "4", "1", "1", "1.000000000"]
    assert "... 4 more; --top 6 lists them" in output.err
    assert run([*args, "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 6
    assert run([*args, "--quiet"]) == 3
    assert len(capsys.readouterr().out.splitlines()) == 6
