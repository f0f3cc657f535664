"""How a run is going, told from `metrics.jsonl` and the checkpoints of its root while it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from ckptool import runs
from ckptool.core.plan import Result
from ckptool.ops.report.steps import ALONE, PHASES, Step, Steps
from ckptool.storage.files import Place, os_errors
from ckptool.storage.metrics_file import MetricsTail, find_metrics
from ckptool.storage.root_lock import is_held
from ckptool.storage.store_path import StorePath

#: Speeds are medians over so many of the last steps, of the present start of the job alone.
WINDOW_STEPS = 50
#: Losses that are given for a curve.
NUM_LOSSES = 500
#: A run is quiet when nothing was written for this many times the usual step, and at least a minute.
_QUIET_STEPS = 10
_QUIET_SECONDS = 60.0
#: A rank is behind when it takes so many times the median for what it does alone, and the step is longer for it.
_BEHIND_FACTOR = 1.5
_MIN_SHARE_OF_STEP = 0.05


class Watch:
    """A run under watch; each `look` reads what was written since the last one."""

    def __init__(
        self, root: Place | None = None, total_steps: int | None = None, work_dir: Place | None = None
    ) -> None:
        """`total_steps` is where the run will end, for the time left; `work_dir` has its metrics.jsonl if the root
        hasn't. Raises NotFoundError without one."""
        self.root = runs.default_root() if root is None else root
        self._total_steps = total_steps
        self._file = find_metrics(self.root, work_dir)
        self._tail = MetricsTail(self._file)
        self._steps = Steps()
        self._durable: tuple[list[tuple[str, float]], dict[str, Any] | None] = ([], None)

    def look(self) -> Result:
        """The state of the run now; `details` has None for what the run does not record. Raises DamagedError."""
        for store in {place.store for place in (self.root, self._file) if isinstance(place, StorePath)}:
            store.refresh()
        self._steps.add(self._tail.new_records())
        with os_errors(self._file):
            age_seconds = max(0.0, time.time() - self._file.stat().st_mtime)
        return Result("top", str(self.root), details={**self._facts(age_seconds), "checkpoint": self._last_durable()})

    def _facts(self, age_seconds: float) -> dict[str, Any]:
        kept, attempts = self._steps.kept, self._steps.attempts
        last = kept[-1] if kept else None
        window = [step for step in kept[-WINDOW_STEPS:] if step.step >= attempts[-1].first_step]
        step_seconds = _median(step.step_seconds for step in window)
        saves = [step.checkpoint_seconds for step in kept if step.checkpoint_seconds]
        usual_seconds = (step_seconds or 0.0) * _QUIET_STEPS + (saves[-1] if saves else 0.0)
        return {
            "step": last.step if last else None,
            "total_steps": self._total_steps,
            "consumed": last.consumed if last else None,
            "loss": last.loss if last else None,
            "losses": [step.loss for step in kept[-NUM_LOSSES:] if step.loss is not None],
            "eval_loss": _last(kept, lambda step: step.eval_loss),
            "lr": last.lr if last else None,
            "grad_norm": last.grad_norm if last else None,
            "num_skipped": sum(step.skipped for step in window),
            "tokens_per_second": _median(step.tokens_per_second for step in window),
            "step_seconds": step_seconds,
            "phases": {name: _median(step.phases[i] for step in window) for i, name in enumerate(PHASES)},
            "checkpoint_seconds": saves[-1] if saves else None,
            "mfu": _median(step.mfu for step in window),
            "ranks": _ranks(window),
            "max_memory_bytes": last.max_memory_bytes if last else None,
            "world_size": attempts[-1].world_size if attempts else None,
            "num_attempts": len(attempts),
            "num_lost_steps": sum(attempt.num_lost for attempt in attempts),
            "seconds_left": self._seconds_left(window),
            "age_seconds": round(age_seconds, 3),
            "held": is_held(self._file.parent),
            "quiet": age_seconds > max(_QUIET_SECONDS, usual_seconds),
        }

    def _seconds_left(self, window: list[Step]) -> float | None:
        """At the mean pace of the window, saving included."""
        took = [
            step.step_seconds + (step.checkpoint_seconds or 0.0) for step in window if step.step_seconds is not None
        ]
        if self._total_steps is None or not took:
            return None
        return max(0, self._total_steps - window[-1].step) * statistics.fmean(took)

    def _last_durable(self) -> dict[str, Any] | None:
        """The newest complete checkpoint; its metadata is read again only when a step folder came, went or changed."""
        with os_errors(self.root):
            present = sorted(
                (path.name, path.stat().st_mtime) for path in self.root.iterdir() if runs.is_step_name(path.name)
            )
        if present != self._durable[0]:
            latest = runs.find_latest(self.root)
            found = {"name": latest.path.name, "path": str(latest.path)} if latest else None
            self._durable = (present, found)
        found = self._durable[1]
        if found is None:
            return None
        written = dict(present).get(found["name"], 0.0)
        return {**found, "age_seconds": round(max(0.0, time.time() - written), 3)}


def top(root: Place | None = None, total_steps: int | None = None, work_dir: Place | None = None) -> Result:
    """Look once at the run in `root` (default: CKPTOOL_ROOT or ./ckpt), which has its metrics.jsonl there or in
    `work_dir`. Raises NotFoundError, DamagedError."""
    return Watch(root, total_steps, work_dir).look()


def _median(numbers: Iterable[float | None]) -> float | None:
    found = [number for number in numbers if number is not None]
    return statistics.median(found) if found else None


def _last(steps: list[Step], value: Callable[[Step], float | None]) -> float | None:
    return next((found for step in reversed(steps) if (found := value(step)) is not None), None)


def _ranks(window: list[Step]) -> dict[str, Any] | None:
    """The last measurement of what each rank did alone, and which ranks are behind; None when there was none."""
    measured = next((step for step in reversed(window) if step.ranks), None)
    if measured is None or measured.ranks is None:
        return None
    behind = set()
    for name in ALONE:
        took = measured.ranks[name]
        median = statistics.median(took)
        # A slow product is a slow rank, however short it is; data that is read in no time is not.
        least = 0.0 if name == "probe" else _MIN_SHARE_OF_STEP * (measured.step_seconds or 0.0)
        behind |= {rank for rank, seconds in enumerate(took) if seconds > max(_BEHIND_FACTOR * median, median + least)}
    return {
        "step": measured.step,
        **{f"{name}_seconds": measured.ranks[name] for name in ALONE},
        "behind": sorted(behind),
    }
