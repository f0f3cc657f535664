from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptool.cli.main import run
from ckptool.cli.top import curve
from ckptool.storage.root_lock import hold_root


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    records = [
        {"step": step, "loss": 8.0 / step, "lr": 0.001, "grad_norm": 1.5, "step_seconds": 0.5, "tokens_per_second": 1e6}
        | {"attempt": "a", "world_size": 8, "consumed": step * 4, "max_memory_bytes": 7 * 10**10, "data_seconds": 0.01}
        | {"mfu": 0.4567, "rank_data_seconds": [0.01] * 7 + [0.2], "rank_probe_seconds": [0.002, 0.001] + [0.001] * 6}
        for step in range(1, 101)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_a_picture_fits_80_columns(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", str(run_root), "--steps", "20000", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(run_root)
    assert lines[1:] == [
        "  step       100 of 20,000, 3 h left, data position 400",
        "  loss       0.08  grad norm 1.5  lr 0.001",
        "             █▄▃" + "▂" * 5 + "▁" * 42,
        "  speed      1,000,000 tokens/s, 0.5 s a step, MFU 45.7%",
        "  phases     data 0.01 s",
        "  ranks      data 0.01 to 0.2 s, product 1 to 2 ms; BEHIND: 0, 7",
        "  memory     70.0 GB",
        "  checkpoint none is complete yet",
        "  job        8 ranks",
        "             last heard of 0 s ago: no run has the root now",
    ]
    assert max(map(len, lines[1:])) <= 80


def test_a_run_that_ended_is_told_from_one_that_hangs(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = time.time() - 3 * 3600 - 60
    os.utime(run_root / "metrics.jsonl", (then, then))
    said = []
    for lock in (hold_root(run_root), None):
        assert run(["top", str(run_root), "--once"]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1].strip())
        if lock is not None:
            lock.release()
    assert said == ["QUIET for 3 h: not ended, hanging?", "last heard of 3 h ago: no run has the root now"]


def test_quiet_prints_the_step(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", str(run_root), "--quiet"]) == 0
    assert capsys.readouterr().out == "100\n"


def test_a_curve_goes_from_the_lowest_to_the_highest() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 60) == "▁▂▃▄▅▆▇█"
    assert curve([2.0, 2.0], 60) == "▁▁"
    assert curve([], 60) == ""
    assert len(curve(list(range(1000)), 60)) <= 60


def test_in_a_terminal_it_goes_on_until_it_is_interrupted(run_root: Path) -> None:
    ours, theirs = pty.openpty()
    # A shell's background jobs ignore SIGINT, and so would their children: take Python's own handler.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from ckptool.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "top", str(run_root), "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    try:
        with (run_root / "metrics.jsonl").open("a") as file:
            shown = read_until(ours, b"100, data position")
            file.write(json.dumps({"step": 101, "attempt": "a", "world_size": 8, "consumed": 404}) + "\n")
            file.flush()
            shown += read_until(ours, b"101, data position 404")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        os.close(ours)
    assert shown.count(b"data position") >= 2


def read_until(terminal: int, words: bytes, limit_seconds: float = 30.0) -> bytes:
    until, shown = time.monotonic() + limit_seconds, b""
    while words not in shown:
        assert time.monotonic() < until, shown
        shown += os.read(terminal, 4096)
    return shown
