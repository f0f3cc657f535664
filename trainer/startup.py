"""How long a process takes from its start to the end of its first step, and for what."""

from __future__ import annotations

import os
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what this measures must not be imported by it
    from trainer.metrics import Log
    from trainer.parallel import Ranks

#: When the first modules of the trainer were imported.
_IMPORTED = time.monotonic()

IMPORTS, FIRST_STEP = "imports", "first step"
#: A rank whose imports take so many times the median, and so many seconds longer, is named.
_SLOW_FACTOR, _SLOW_SECONDS = 1.5, 1.0


class Startup:
    """The parts of a start, in order: each begins where the one before it ended, so that they add up to the whole.

    `began` is a time of `time.monotonic`; without one, it begins now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._changed = time.monotonic() if began is None else began

    @classmethod
    def of_process(cls) -> Startup:
        """One that began with this process, before the interpreter had read a line."""
        return cls(time.monotonic() - process_age_seconds())

    def ended(self, part: str) -> None:
        """What went on since the last part ended was this one."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._changed
        self._changed = now

    def first_step_ended(self, ranks: Ranks, log: Log, attempt: str, step: int, graphs: dict[str, int]) -> None:
        """Say and record where the time went, once; every rank calls this after each step.

        `graphs` is how many of torch.compile's graphs were "compiled", and how many came from a cache, "cached".
        """
        if FIRST_STEP in self.seconds:
            return
        self.ended(FIRST_STEP)
        hosts, imports = zip(*ranks.gather((socket.gethostname(), self.seconds.get(IMPORTS, 0.0))), strict=True)
        log.say(self.line(graphs))
        if who := slowest(imports):
            log.say(
                f"slow: rank {who[0]} on {hosts[who[0]]}: imports took {who[1]:.1f} s, the median is {who[2]:.1f} s"
            )
        log.startup(
            {
                "attempt": attempt,
                "step": step,
                "world_size": ranks.world_size,
                "total_seconds": round(sum(self.seconds.values()), 3),
                "seconds": {part: round(seconds, 3) for part, seconds in self.seconds.items()},
                "rank_import_seconds": [round(seconds, 3) for seconds in imports],
                "graphs": graphs,
            }
        )

    def line(self, graphs: dict[str, int]) -> str:
        """The parts for a person, but for those that would be 0.0."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.05)
        compiled = (
            f" (graphs compiled: {graphs['compiled']}, from the cache: {graphs['cached']})"
            if any(graphs.values())
            else ""
        )
        return f"first step {sum(self.seconds.values()):.1f} s after the start: {parts}{compiled}"


def slowest(seconds: tuple[float, ...]) -> tuple[int, float, float] | None:
    """The rank that made the others wait, its seconds and the median; None when none was much slower."""
    most, median = max(seconds), statistics.median(seconds)
    if most < max(_SLOW_FACTOR * median, median + _SLOW_SECONDS):
        return None
    return seconds.index(most), most, median


def process_age_seconds() -> float:
    """How long ago this process began, to 10 ms, by Linux; elsewhere, how long ago its first modules were imported."""
    imported = time.monotonic() - _IMPORTED
    try:
        # The name, in brackets, is field 2; field 22 is the start in ticks since the machine's own (man 5 proc).
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[22 - 3])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return imported
    return max(age, imported) if ticks else imported
