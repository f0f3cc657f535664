"""Which rank makes the others wait.

In a step every rank waits for the slowest, so all take the same time: what tells them apart is the time of what a rank
does alone. That is reading data, saving, and a small matrix product of fixed size, timed for this purpose.
"""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass

import torch

from trainer.stopwatch import Stopwatch

#: What a rank does without waiting for others. The probe is the matrix product.
_ALONE = ("data", "probe")
#: A difference below this share of the step is no reason to look for another machine.
_MIN_SHARE_OF_STEP = 0.05
_PROBE_SIZE = {"cuda": 4096, "cpu": 256}
_NUM_PROBES = 3


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in one step by phase, and those of the probe. `clock_mhz` is its GPU's; 0 if not known."""

    rank: int
    host: str
    step_seconds: float
    seconds: dict[str, float]
    clock_mhz: int

    @classmethod
    def measure(cls, rank: int, device: torch.device, step_seconds: float, stopwatch: Stopwatch) -> RankTimes:
        seconds = {**stopwatch.seconds, "probe": probe_seconds(device)}
        return cls(rank, socket.gethostname(), step_seconds, seconds, _clock_mhz(device))


def seconds_of_ranks(ranks: list[RankTimes] | None, name: str) -> list[float] | None:
    """Of each rank the seconds of "data" or "probe", to the microsecond; None when nothing was measured."""
    return None if ranks is None else [round(times.seconds[name], 6) for times in ranks]


def find_stragglers(ranks: list[RankTimes], factor: float) -> list[str]:
    """A line for each rank that takes more than `factor` times the median of all ranks for what it does alone."""
    lines = []
    for name in _ALONE:
        median = statistics.median(times.seconds[name] for times in ranks)
        for times in ranks:
            took = times.seconds[name]
            matters = name == "probe" or took - median > _MIN_SHARE_OF_STEP * times.step_seconds
            if took > factor * median and matters:
                clock = f", GPU clock {times.clock_mhz} MHz" if times.clock_mhz else ""
                who = f"slow: rank {times.rank} on {times.host}"
                lines.append(f"{who}: {name} took {took:.4f} s, the median is {median:.4f} s{clock}")
    return lines


def probe_seconds(device: torch.device) -> float:
    """The best of a few timings of a matrix product that no other rank takes part in."""
    size = _PROBE_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return min(_time_product(matrix) for _ in range(_NUM_PROBES))


def _time_product(matrix: torch.Tensor) -> float:
    if matrix.device.type == "cuda":
        torch.cuda.synchronize(matrix.device)
    began = time.perf_counter()
    matrix @ matrix
    if matrix.device.type == "cuda":
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began


def _clock_mhz(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    try:
        return torch.cuda.clock_rate(device)
    except (ModuleNotFoundError, RuntimeError):  # needs nvidia-ml-py and a driver that answers
        return 0
