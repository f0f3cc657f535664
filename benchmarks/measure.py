"""Whole-process measurements: wall seconds, CPU seconds and peak memory, as the operating system accounts them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

SAMPLE_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True)
class Usage:
    """One run, of a process and those that it starts. `peak_bytes` is the most memory that they held together, mapped
    file pages included: a single process's resident set, pages that several share counted once."""

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(name: str, command: Sequence[str]) -> Usage:
    """Run a command to its end and measure it. Raises RuntimeError with its output when it fails."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    samples = [0]
    sampler = threading.Thread(target=_sample, args=(process.pid, samples), daemon=True)
    sampler.start()
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_seconds = time.monotonic() - start
    sampler.join()
    if status:
        raise RuntimeError(f"{name} failed with status {status}:\n{output.decode(errors='replace')[-3000:]}")
    peak_bytes = max(usage.ru_maxrss * 1024, *samples)
    return Usage(name, wall_seconds, usage.ru_utime + usage.ru_stime, peak_bytes)


def _sample(pid: int, samples: list[int]) -> None:
    """Every now and then, where there is more than one process: the sum of their proportional set sizes (proc(5))."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if children := process.children(recursive=True):
                samples.append(sum(_proportional_bytes(each) for each in [process, *children]))
            time.sleep(SAMPLE_INTERVAL_SECONDS)


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has just ended
        return 0


def in_turns(
    commands: Mapping[str, Sequence[str]], num_rounds: int, before: Callable[[str], None]
) -> dict[str, list[Usage]]:
    """Every command once per round, one after another, so that a drifting machine drifts for all of them.

    `before(name)` prepares each run, untimed. A first round is run and not counted.
    """
    rows: dict[str, list[Usage]] = {name: [] for name in commands}
    for number in range(num_rounds + 1):
        for name, command in commands.items():
            before(name)
            usage = run(name, command)
            print(f"round {number}: {name}: {usage.wall_seconds:.2f} s", file=sys.stderr, flush=True)
            if number:
                rows[name].append(usage)
    return rows


def table(rows: Mapping[str, list[Usage]], base: str) -> str:
    """A Markdown table of medians, with the wall ratio to `base`, taken round by round."""
    lines = [
        f"| | wall s (median, min-max) | CPU s | peak MB | wall / {base} |",
        "|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        walls = [usage.wall_seconds for usage in runs]
        ratio = statistics.median(u.wall_seconds / b.wall_seconds for u, b in zip(runs, rows[base], strict=True))
        cpu = statistics.median(usage.cpu_seconds for usage in runs)
        peak = statistics.median(usage.peak_bytes for usage in runs) / 1e6
        lines.append(
            f"| {name} | {statistics.median(walls):.2f} ({min(walls):.2f}-{max(walls):.2f}) "
            f"| {cpu:.2f} | {peak:.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def write_rows(path: Path, rows: Mapping[str, list[Usage]]) -> None:
    """The raw rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for runs in rows.values():
            for usage in runs:
                file.write(json.dumps(asdict(usage)) + "\n")


def machine() -> str:
    """One line about where this was measured."""
    import torch

    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}"
    )
