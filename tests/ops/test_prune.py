"""Prune and pin on real run roots: what goes, what stays, and what happens when the disk says no."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.cli.main import run
from ckptool.errors import CkptoolError, DamagedError, NotFoundError, UsageError
from ckptool.ops import prune as prune_module
from ckptool.ops.pin import pin
from ckptool.ops.prune import PrunePlan, prune
from ckptool.runs import find_latest
from ckptool.storage.pins import read_pins
from ckptool.storage.staging import create_staging

STEPS = (10, 20, 30, 40, 50)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    for step in STEPS:
        provenance = ckptool.Provenance("0", created=f"2026-01-{step}T00:00:00+00:00" if step < 30 else "", step=step)
        ckptool.save({"model": {"a": torch.ones(100) * step}}, root / f"step-{step}", provenance=provenance)
    ckptool.save({"model": {"a": torch.ones(100)}}, root / "base", provenance=ckptool.Provenance("0"))
    (root / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": {abs(s - 20)}.5}}\n' for s in range(1, 60)))
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()} - {".pins"}


def steps(root: Path) -> set[int]:
    return {int(name.removeprefix("step-")) for name in names(root) if name.startswith("step-")}


def test_keep_rules_on_a_real_root(root: Path) -> None:
    result = prune(root, keep_last=1, keep_every=30, keep_best=("loss", "min", 1))
    assert result.executed and result.details["failed"] == {}
    assert result.details["removed"] == ["step-10", "step-40"]
    assert steps(root) == {20, 30, 50}
    assert "base" in names(root)
    reasons = {entry["name"]: entry["reason"] for entry in result.details["keep"]}
    assert reasons["step-20"] == "among the best: loss 0.5"
    assert result.details["freed_bytes"] > 2 * 400


def test_by_age(root: Path) -> None:
    prune(root, keep_within_seconds=3600)
    assert steps(root) == {30, 40, 50}


def test_without_a_rule_nothing_is_removed(root: Path) -> None:
    with pytest.raises(UsageError, match="nothing says what to keep"):
        prune(root)
    (root / "step-30" / ".metadata").unlink()
    assert prune(root, stale=True).details["removed"] == ["step-30"]
    assert steps(root) == {10, 20, 40, 50}


def test_field_report_25_half_written_ones_count_for_nothing_and_stay_until_asked(root: Path) -> None:
    """The newest ones are broken: the last good one stays although K newer folders are there."""
    (root / "step-50" / ".metadata").unlink()
    with (root / "step-40" / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    result = prune(root, keep_last=1)
    assert steps(root) == {30, 40, 50}
    assert {entry["name"] for entry in result.details["broken"]} == {"step-40", "step-50"}
    latest = find_latest(root)
    assert latest is not None and latest.path.name == "step-30"
    assert prune(root, keep_last=1, stale=True).details["removed"] == ["step-40", "step-50"]
    assert steps(root) == {30}


def test_what_is_not_understood_is_not_stale(root: Path) -> None:
    (root / "step-20" / "ckptool.json").write_text('{"format_version": 1, "tool_version": 5}')
    (root / "step-30" / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    result = prune(root, stale=True)
    assert result.details["removed"] == ["step-20"]
    assert [entry["name"] for entry in result.details["broken"]] == ["step-30"]


def die_while_writing(target: Path) -> None:
    script = (
        "import sys, pathlib; from ckptool.storage.staging import create_staging\n"
        "s = create_staging(pathlib.Path(sys.argv[1])); s.content.mkdir(); (s.content / 'x').write_bytes(bytes(5000))"
    )
    subprocess.run([sys.executable, "-c", script, str(target)], check=True)


def test_of_dead_writers_only_those_that_saved_a_step_go_with_dead_saves(root: Path) -> None:
    for name in ("step-60", "step-50-hf", "other"):
        die_while_writing(root / name)
    (root / "step-10" / ".metadata").unlink()
    assert prune(root, keep_last=5, dead_saves=True).details["removed"] == [".step-60.staging"]
    assert names(root) >= {".step-50-hf.staging", ".other.staging", "step-10"}


def test_dead_writers_folders_go_and_living_ones_stay(root: Path) -> None:
    die_while_writing(root / "step-60")
    living = create_staging(root / "step-70")
    assert names(root) >= {".step-60.staging", ".step-70.staging"}
    result = prune(root, keep_last=5)
    assert [entry["name"] for entry in result.details["broken"]] == [".step-60.staging"]
    assert prune(root, stale=True).details["removed"] == [".step-60.staging"]
    assert ".step-70.staging" in names(root)
    living.lock.check_held()
    living.discard()


def test_pins(root: Path) -> None:
    before = (root / "step-10" / ".metadata").stat().st_mtime_ns, sorted(os.listdir(root / "step-10"))
    pin("step-10", root=root, reason="the paper's")
    pin(str(root / "step-20"))
    assert read_pins(root) == {"step-10": "the paper's", "step-20": ""}
    assert ((root / "step-10" / ".metadata").stat().st_mtime_ns, sorted(os.listdir(root / "step-10"))) == before
    (root / ".pins" / "step-20.json").write_text("[")  # a pin that can't be read holds
    prune(root, keep_last=1)
    assert steps(root) == {10, 20, 50}
    pin("step-20", root=root, remove=True)
    assert prune(root, keep_last=1).details["removed"] == ["step-20"]
    with pytest.raises(NotFoundError, match="step-20"):
        pin("step-20", root=root, remove=True)
    with pytest.raises(NotFoundError):
        pin("step-99", root=root)
    with pytest.raises(NotFoundError, match="step-50 is not pinned"):
        pin("step-50", root=root, remove=True)


def test_a_pin_made_while_the_question_stands_holds(root: Path) -> None:
    def confirm(plan: PrunePlan) -> bool:
        assert {entry.name for entry in plan.remove} == {"step-10", "step-20", "step-30", "step-40"}
        pin("step-20", root=root)
        return True

    result = prune(root, keep_last=1, confirm=confirm)
    assert steps(root) == {20, 50}
    assert "pinned meanwhile" in result.details["failed"]["step-20"]


def test_the_last_good_one_can_not_be_removed_even_when_the_newer_one_breaks_meanwhile(root: Path) -> None:
    def confirm(plan: PrunePlan) -> bool:
        (root / "step-50" / ".metadata").unlink()
        return True

    result = prune(root, keep_last=1, confirm=confirm)
    assert steps(root) == {40, 50}
    assert "last good checkpoint" in result.details["failed"]["step-40"]


def test_half_of_one_has_no_name_and_the_next_prune_finishes_what_a_killed_one_began(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = prune_module._remove_tree

    def dying(path: Path) -> None:
        if path.name == ".step-20.removed":
            (path / ".metadata").unlink()
            raise ckptool.CkptoolError("the disk went away")
        real(path)

    monkeypatch.setattr(prune_module, "_remove_tree", dying)
    result = prune(root, keep_last=1)
    assert result.details["removed"] == ["step-10", "step-30", "step-40"]
    assert result.details["failed"] == {"step-20": "the disk went away"}
    assert [s.name for s in ckptool.list_checkpoints(root)] == ["base", "step-50"]
    monkeypatch.undo()
    again = prune(root, keep_last=1)
    assert again.details["removed"] == [".step-20.removed"]
    assert again.details["freed_bytes"] > 400
    assert names(root) == {"base", "step-50"}


def test_one_that_another_process_removes_meanwhile_is_gone(root: Path) -> None:
    def remove_first(plan: PrunePlan) -> bool:
        (root / "step-10").rename(root / ".step-10.removed")
        return True

    assert prune(root, keep_last=4, confirm=remove_first).details["failed"] == {}
    assert names(root) == {"base", *(f"step-{step}" for step in STEPS[1:])}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_a_folder_that_may_not_be_written_is_reported(root: Path) -> None:
    (root / "step-20").chmod(0o500)
    result = prune(root, keep_last=1)
    assert "permission denied" in result.details["failed"]["step-20"]
    assert names(root) == {"base", ".step-20.removed", "step-50"}
    (root / ".step-20.removed").chmod(0o700)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    shutil.move(root / "step-20", tmp_path / "elsewhere")
    (root / "step-20").symlink_to(tmp_path / "elsewhere")
    (root / "step-10" / "link").symlink_to(tmp_path / "elsewhere")
    result = prune(root, keep_last=1)
    assert "is a link" in result.details["failed"]["step-20"]
    assert (tmp_path / "elsewhere" / ".metadata").exists()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("[1]", DamagedError),
        ('{"loss": 1.0}', DamagedError),
        ('{"step": "5", "loss": 1.0}', DamagedError),
        ('{"step": 50, "loss": "low"}', DamagedError),
        ('{"step": 50, "loss": true}', DamagedError),
        ("x" * (1 << 20), DamagedError),
    ],
)
def test_strange_metrics_remove_nothing(root: Path, line: str, error: type[CkptoolError]) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(error):
        prune(root, keep_best=("loss", "min", 1))
    assert steps(root) == set(STEPS)


def test_metrics_of_a_killed_run(root: Path) -> None:
    """A torn line says nothing; a step trained again has its later value; NaN is not the best."""
    (root / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 0.1}\n{"step": 20, "lo{"step": 30, "loss": 3}\n'
        '{"step": 10, "loss": 9}\n{"step": 40, "loss": NaN}\n{"step": 20, "loss": 4}\n{"ste'
    )
    prune(root, keep_best=("loss", "min", 1))
    assert steps(root) == {20, 50}
    with pytest.raises(UsageError, match="no step has a 'accuracy'"):
        prune(root, keep_best=("accuracy", "max", 1))


def test_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pin", "step-10", "--root", str(root), "--reason", "baseline"]) == 0
    assert run(["ls", str(root)]) == 0
    assert "complete, pinned: baseline" in capsys.readouterr().out
    assert run(["prune", str(root)]) == 2
    assert run(["prune", str(root), "--keep-last", "2"]) == 2  # no terminal to ask on
    said = capsys.readouterr()
    assert "remove  step-20" in said.out and "add --yes" in said.err
    assert run(["prune", str(root), "--keep-last", "2", "--dry-run"]) == 0
    assert steps(root) == set(STEPS)
    capsys.readouterr()
    assert run(["prune", str(root), "--keep-last", "2", "--yes", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["executed"], answer["removed"]) == (True, ["step-20", "step-30"])
    assert run(["prune", "--root", str(root), "--keep-best", "loss:max", "1", "--keep-within", "1min", "-y", "-q"]) == 0
    assert run(["pin", "step-10", "--root", str(root), "--remove", "--json"]) == 0
    assert run(["prune", str(root), "--keep-best", "loss:low", "1", "-y"]) == 2
    assert run(["prune", str(root), "--keep-within", "7 bananas", "-y"]) == 2
    assert run(["prune", str(root / "metrics.jsonl"), "--keep-last", "1", "-y"]) == 2


def test_a_root_that_is_not_there_is_no_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["prune", "nodir", "--keep-last", "1", "--yes"]) == 1
    assert capsys.readouterr().err.startswith("error: there is no folder nodir\nhint: ")
    assert run(["prune", "--keep-last", "1", "--yes"]) == 1  # the default one
    with pytest.raises(NotFoundError, match="no folder nodir"):
        prune(Path("nodir"), stale=True)


def test_a_removal_that_failed_is_not_worded_as_a_dry_run(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise ckptool.CkptoolError("permission denied")

    monkeypatch.setattr(prune_module, "remove_checkpoint", refuse)
    assert run(["prune", str(root), "--keep-last", "4", "--yes"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("\nnothing was removed\n")
    assert said.err == "error: step-10 was not removed: permission denied\n"
