"""Names, the newest complete checkpoint, and listings of a run root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import NotFoundError
from ckptool.runs import default_root, find_latest, list_checkpoints, resolve


def save(path: Path, step: int = 0, consumed: int | None = None) -> Path:
    position = None if consumed is None else {"consumed": consumed}
    provenance = ckptool.Provenance("0", created="2026-01-02T03:04:05+00:00", step=step, world_size=2)
    ckptool.save({"model": {"a": torch.ones(1000)}}, path, provenance=provenance, position=position)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder after a bad day: step-10 is whole, everything newer is not."""
    root = tmp_path_factory.mktemp("runs") / "ckpt"
    save(root / "Llama-3.1-8B")
    save(root / "step-9", step=9)
    save(root / "step-10", step=10, consumed=160)
    (save(root / "step-20", step=20) / ".metadata").unlink()
    with (save(root / "step-30", step=30) / "__0_0.distcp").open("r+b") as file:
        file.truncate(3000)
    (root / "step-40").mkdir()
    (root / ".step-50.staging-0123abcd").mkdir()
    (root / ".step-50.staging-0123abcd" / "__0_0.distcp").write_bytes(bytes(100))
    (root / "logs").mkdir()
    (root / "metrics.jsonl").write_text("{}\n")
    save(root / "run" / "step-99", step=99)
    return root


def test_the_newest_complete_one_is_chosen_and_the_reasons_given(root: Path) -> None:
    latest = find_latest(root)
    assert latest is not None
    assert latest.path == root / "step-10"
    reasons = dict(latest.passed_over)
    assert list(reasons) == ["step-40", "step-30", "step-20"]
    assert "no .metadata" in reasons["step-20"]
    assert "ends at 3000 (truncated?)" in reasons["step-30"]
    assert "no .metadata" in reasons["step-40"]
    assert resolve("latest", root) == root / "step-10"


def test_imports_are_no_candidates(tmp_path: Path) -> None:
    save(tmp_path / "Llama-3.1-8B", step=7)
    assert find_latest(tmp_path) is None
    with pytest.raises(NotFoundError, match="no complete step-N checkpoint"):
        resolve("latest", tmp_path)


def test_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("step-9", root) == root / "step-9"
    assert resolve(str(root / "step-9"), Path("elsewhere")) == root / "step-9"
    assert resolve("step-20", root) == root / "step-20"
    monkeypatch.chdir(root)
    assert resolve("step-9", Path("elsewhere")) == Path("step-9")
    monkeypatch.chdir(root.parent)
    monkeypatch.delenv("CKPTOOL_ROOT", raising=False)
    assert default_root() == Path("ckpt")
    assert resolve("Llama-3.1-8B") == Path("ckpt/Llama-3.1-8B")
    monkeypatch.setenv("CKPTOOL_ROOT", str(root / "run"))
    assert resolve("step-99") == root / "run" / "step-99"


def test_a_name_that_is_not_there(root: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint step-7") as caught:
        resolve("step-7", root)
    assert "step-9" in caught.value.hint
    with pytest.raises(NotFoundError) as caught:
        resolve("quite-another", root)
    assert "Llama-3.1-8B" in caught.value.hint
    with pytest.raises(NotFoundError) as caught:
        resolve("step-7", root / "nowhere")
    assert "CKPTOOL_ROOT" in caught.value.hint


def test_a_parent_folder_names_the_checkpoints_inside(root: Path) -> None:
    with pytest.raises(NotFoundError, match="has some inside") as caught:
        resolve("run", root)
    assert str(root / "run" / "step-99") in caught.value.hint
    with pytest.raises(NotFoundError, match=r"logs is not a checkpoint"):
        resolve("logs", root)


def test_listing(root: Path) -> None:
    summaries = {summary.name: summary for summary in list_checkpoints(root)}
    assert list(summaries) == [
        ".step-50.staging-0123abcd",
        "Llama-3.1-8B",
        "step-9",
        "step-10",
        "step-20",
        "step-30",
        "step-40",
    ]
    ten = summaries["step-10"]
    assert (ten.complete, ten.step, ten.consumed, ten.world_size, ten.num_bytes) == (True, 10, 160, 2, 4000)
    assert ten.created == 1767323045
    assert {name: summary.complete for name, summary in summaries.items() if summary.complete}.keys() == {
        "Llama-3.1-8B",
        "step-9",
        "step-10",
    }
    assert all(summary.reason and "\n" not in summary.reason for summary in summaries.values() if not summary.complete)
    staging = summaries[".step-50.staging-0123abcd"]
    assert (staging.kind, staging.complete, staging.num_bytes) == ("staging", False, 100)


def test_roots_that_are_empty_missing_or_files(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "missing") == []
    assert find_latest(tmp_path / "missing") is None
    (tmp_path / "file").write_text("")
    for function in (list_checkpoints, find_latest):
        with pytest.raises(NotFoundError, match="is a file"):
            function(tmp_path / "file")


def test_a_damaged_sidecar_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (save(tmp_path / "step-1", step=1) / "ckptool.json").write_text("{")
    (save(tmp_path / "step-2", step=2, consumed=5) / "data_position.json").write_text("[")
    one, two = list_checkpoints(tmp_path)
    assert (one.complete, two.complete, two.consumed) == (False, True, None)
    assert "ckptool.json" in one.reason


def test_torch_is_not_imported(root: Path) -> None:
    code = f"import sys, ckptool; ckptool.list_checkpoints({str(root)!r}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
