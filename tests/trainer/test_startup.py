"""The parts of a start: they add up, they begin with the process, and they are said once."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.spawn import run_ranks
from tests.trainer.tiny import DEVICE, at_most, read_lines, run
from trainer.startup import Startup, process_age_seconds, slowest

LINE = re.compile(r"^first step ([\d.]+) s after the start: (.+)$", re.MULTILINE)


def test_the_parts_add_up_and_a_repeated_one_grows():
    began = time.monotonic() - 3
    startup = Startup(began)
    startup.ended("imports")
    for part in ("data", "build", "data"):
        time.sleep(0.01)
        startup.ended(part)
    took = time.monotonic() - began
    assert list(startup.seconds) == ["imports", "data", "build"]
    assert startup.seconds["imports"] == pytest.approx(3, abs=0.1)
    assert startup.seconds["data"] >= 0.02
    assert sum(startup.seconds.values()) == pytest.approx(took, abs=0.1)


def test_a_start_begins_with_its_process_and_not_with_our_first_module():
    code = (
        "import time; time.sleep(1); from trainer.startup import process_age_seconds; print(process_age_seconds())\n"
        "time.sleep(0.5); print(process_age_seconds())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, second = map(float, out.split())
    assert (1 if sys.platform == "linux" else 0) <= first < 30
    assert second - first == pytest.approx(0.5, abs=0.3)


def test_this_process_is_older_than_this_test():
    before = process_age_seconds()
    time.sleep(0.05)
    assert process_age_seconds() > before > 0


def test_a_rank_is_named_when_its_imports_took_much_longer():
    assert slowest((2.0, 2.1, 9.0, 2.0)) == (2, 9.0, 2.05)
    assert slowest((20.0, 20.0, 22.0)) is None
    assert slowest((0.1, 0.1, 0.5)) is None
    assert slowest((3.0,)) is None


def trained(rank: int, root, capture: str) -> str:
    """What a rank says while it trains two steps."""
    with open(capture + str(rank), "w+") as said:
        sys.stderr.flush()
        os.dup2(said.fileno(), 2)
        run(root, steps=2)
        sys.stderr.flush()
        said.seek(0)
        return said.read()


def test_the_first_step_of_a_process_is_reported_once_by_rank_0(root, tmp_path):
    said = run_ranks(at_most(2), trained, root, str(tmp_path / "said"))
    [(total, parts)] = LINE.findall(said[0])
    shown = dict(part.rsplit(" ", 1) for part in parts.split(", "))
    assert float(total) == pytest.approx(sum(map(float, shown.values())), abs=0.05 * 9)
    assert not any(LINE.search(text) for text in said[1:])

    [line] = read_lines(root / "startup.jsonl")
    assert line["total_seconds"] == pytest.approx(sum(line["seconds"].values()), abs=0.01)
    assert {"ranks", "data", "build", "load", "first step"} <= set(line["seconds"])
    assert (line["step"], line["world_size"], line["graphs"]) == (1, at_most(2), {"compiled": 0, "cached": 0})
    assert len(line["rank_import_seconds"]) == at_most(2)


def test_a_resumed_process_reports_its_own_first_step(root):
    run(root, steps=1)
    run(root, steps=3)
    lines = read_lines(root / "startup.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["attempt"] == read_lines(root / "metrics.jsonl")[0]["attempt"]
    assert lines[1]["attempt"] == read_lines(root / "metrics.jsonl")[-1]["attempt"]


def test_nothing_is_imported_that_the_first_step_may_not_need():
    code = "import sys, trainer.train; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    needless = {"datasets", "pandas", "pyarrow", "peft", "tensorboard", "wandb"}
    assert "transformers" in out.split()
    assert needless.isdisjoint(out.split()), needless & set(out.split())


def test_the_command_counts_its_imports(root):
    arguments = ["--root", root, "--init-from", "base", "--data", root / "text", "--seq-len", 16, "--steps", 1]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments), "--log-to", "none", "--device", DEVICE],
        check=True,
        capture_output=True,
    )
    took = time.monotonic() - began
    [line] = read_lines(root / "startup.jsonl")
    assert 0.5 < line["seconds"]["imports"] < line["total_seconds"] <= took + 0.05
