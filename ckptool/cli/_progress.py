"""Progress on stderr: a bar with bytes, rate, time left and memory in a terminal, else a line every ten seconds."""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ckptool.cli._output import duration, message, size
from ckptool.core.interfaces import Progress
from ckptool.core.plan import Plan

PLAIN_INTERVAL_SECONDS = 10.0


@contextlib.contextmanager
def progress_on_stderr(quiet: bool) -> Iterator[Callable[[Plan], Progress] | None]:
    """Yield what the operations take as `progress`: called with the plan, it announces it and returns the counter."""
    if quiet:
        yield None
        return
    with contextlib.ExitStack() as open_bars:

        def start(plan: Plan) -> Progress:
            message(f"{plan.source} -> {plan.target}")
            message(
                f"{size(plan.write_bytes)} to write; needs {size(plan.peak_bytes)} of memory for buffers "
                f"and {size(plan.disk_bytes)} of disk"
            )
            if sys.stderr.isatty():
                return open_bars.enter_context(_bar(plan.write_bytes))
            return PlainProgress(plan.write_bytes)

        yield start


@contextlib.contextmanager
def counter_on_stderr(quiet: bool) -> Iterator[Callable[[int], Progress] | None]:
    """The same for operations that only read: `progress(total bytes)` gives the counter."""
    if quiet:
        yield None
        return
    with contextlib.ExitStack() as open_bars:

        def start(total_bytes: int) -> Progress:
            if sys.stderr.isatty():
                return open_bars.enter_context(_bar(total_bytes))
            return PlainProgress(total_bytes)

        yield start


@contextlib.contextmanager
def _bar(total_bytes: int) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[memory]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes, memory="")
        yield lambda num_bytes: bar.update(task, advance=num_bytes, memory=size(peak_memory_bytes()))


class PlainProgress:
    """Counts bytes and prints a line at most every `interval_seconds`."""

    def __init__(self, total_bytes: int, interval_seconds: float = PLAIN_INTERVAL_SECONDS) -> None:
        self._total_bytes = total_bytes
        self._interval_seconds = interval_seconds
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._started = self._last_line = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            now = time.monotonic()
            if now - self._last_line >= self._interval_seconds:
                self._last_line = now
                message(self._line(now - self._started))

    def _line(self, elapsed_seconds: float) -> str:
        rate = self._done_bytes / max(elapsed_seconds, 1e-9)
        left = (self._total_bytes - self._done_bytes) / rate if rate else 0.0
        done = f"{size(self._done_bytes)} of {size(self._total_bytes)}"
        return f"{done}, {size(int(rate))}/s, {duration(left)} left, {size(peak_memory_bytes())} of memory"


def peak_memory_bytes() -> int:
    """The largest resident set of this process so far, mapped pages included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
