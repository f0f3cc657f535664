"""Where a rank is in its run, and the seconds it spent in each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: The parts of a step, in order. Forward and backward include the waits for other ranks that FSDP hides in them.
PHASES = ("data", "forward and backward", "optimizer", "evaluation", "save")
STARTING = "starting"


class Stopwatch:
    """`step` counts finished steps; `num_marks` grows with every change of phase, and is equal on equal progress."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = STARTING
        self.num_marks = 0
        self._num_begun = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._changed = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """How long ago the phase changed."""
        return time.monotonic() - self._changed

    @property
    def may_take_long(self) -> bool:
        """True while starting, in the first step of this process (it may compile), in evaluation and in a save."""
        return self._num_begun <= 1 or self.phase in ("evaluation", "save")

    def begin(self, step: int) -> None:
        """A new step begins, after `step` finished ones: all seconds are 0 again."""
        self.step = step
        self._num_begun += 1
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase_of(self, name: str) -> Iterator[None]:
        """What happens inside is in this phase, and so is what follows until the next begins."""
        self._mark(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
        self._mark(name)

    def _mark(self, name: str) -> None:
        self.phase = name
        self.num_marks += 1
        self._changed = time.monotonic()
