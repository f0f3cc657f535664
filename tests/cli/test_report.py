from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptool.cli.main import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run that was killed once and went on with fewer ranks."""
    copy = Path(shutil.copytree(root, tmp_path_factory.mktemp("run") / "root"))
    records = [
        {"step": step, "loss": 5.0 / step, "lr": 0.1, "attempt": attempt, "world_size": ranks, "consumed": 8 * step}
        for attempt, ranks, steps in (("first", 8, (1, 2, 3, 4)), ("second", 6, (3, 4, 5)))
        for step in steps
    ]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return copy


def facts_of(args: list[str], capsys: Capture) -> dict[str, object]:
    assert run(["report", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_root_shows_its_timeline_and_its_latest_checkpoint(
    run_root: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "report.html"
    facts = facts_of([str(run_root), "--out", str(out)], capsys)
    assert facts["checkpoint"] == str(run_root / "step-5")
    assert (facts["num_steps"], facts["num_attempts"], facts["num_findings"]) == (5, 2, 0)
    page = out.read_text(encoding="utf-8")
    assert facts["page_bytes"] == len(page.encode())
    for section in ("timeline", "checkpoints", "verify", "shards", "sizes", "values"):
        assert f'<section id="{section}"' in page
    assert "8 -&gt; 6 ranks, 2 steps trained again" in page
    assert "it has data files but no .metadata" in page


def test_a_checkpoint_against_the_folder_it_came_from_has_not_changed(
    run_root: Path, hub_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    args = ["report", "tiny", "--root", str(run_root), "--against", str(hub_folder), "--keys", "model.*"]
    assert run([*args, "--out", str(out), "--quiet"]) == 0
    assert "0 of 20 tensors differ" in out.read_text(encoding="utf-8")


def test_a_hugging_face_folder_has_a_page(hub_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    facts = facts_of([str(hub_folder), "--out", str(tmp_path / "report.html")], capsys)
    assert facts["run"] is None and facts["num_chunks"] == facts["num_tensors"] == 20


def test_damage_is_on_the_page(run_root: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = Path(shutil.copytree(run_root / "step-5", tmp_path / "step-5"))
    (data,) = copy.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-800])
    facts = facts_of([str(copy), "--out", str(tmp_path / "report.html")], capsys)
    assert facts["num_findings"] != 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>truncated</td>" in page and "nothing more can be said about the checkpoint" in page


def test_without_values_no_tensor_is_read(run_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run(["report", str(run_root), "--out", str(out), "--no-values", "-q"]) == 0
    page = out.read_text(encoding="utf-8")
    assert '<section id="shards"' in page and '<section id="values"' not in page


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nowhere"], 1, "no checkpoint nowhere"),
        (["step-5", "--keys", "zzz"], 1, "no tensor matches 'zzz'"),
        (["step-5", "--against", "tiny", "--no-values"], 2, "--no-values reads none"),
        (["step-5", "--against", "nowhere"], 1, "no checkpoint nowhere"),
    ],
)
def test_what_can_not_be_shown_is_said_and_writes_nothing(
    args: list[str], code: int, words: str, run_root: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "report.html"
    assert run(["report", *args, "--root", str(run_root), "--out", str(out)]) == code
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_page_that_exists_is_replaced_only_with_overwrite(run_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine")
    args = ["report", "step-5", "--root", str(run_root), "--out", str(out), "--no-values", "-q"]
    assert run(args) == 6
    assert out.read_text() == "mine"
    assert run([*args, "--overwrite"]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
