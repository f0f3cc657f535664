"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(num_done: int, *, peak: float, warmup_steps: int, steps: int, schedule: str) -> float:
    """The rate for the step that follows `num_done` finished ones.

    Rises linearly to `peak` over `warmup_steps`, then stays (`constant`) or falls to 0 at `steps` (`linear`, `cosine`).
    """
    if num_done < warmup_steps:
        return peak * (num_done + 1) / warmup_steps
    progress = min(1.0, (num_done - warmup_steps) / max(1, steps - warmup_steps))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")
