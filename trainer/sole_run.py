"""One run at a time in a root: two would save in each other's way, and the next resume would mix them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckptool
from ckptool import LockedError
from trainer.parallel import Ranks
from trainer.rendezvous import is_restart, recall, remember
from trainer.signals import StopSignals

#: A run that was told to stop may still be saving; of a machine that vanished nothing is heard for minutes.
WAIT_SECONDS = 360.0
_POLL_SECONDS = 1.0

#: Under this the job remembers the name of its lock.
_HOLDER = "holder of the root"


@contextlib.contextmanager
def sole_run(root: Path, ranks: Ranks, stop: StopSignals, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the root, on rank 0, for what happens inside.

    Raises LockedError on every rank when another run that lives holds it, and goes on holding it, or rank 0 is told to
    stop meanwhile.
    """
    held: list[Any] = []
    ranks.from_rank0(lambda: held.append(_hold(root, stop, say)))
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _hold(root: Path, stop: StopSignals, say: Callable[[str], None]) -> Any:
    # Ranks that torchrun has started again are of one job, whose earlier ranks are dead, wherever they were. It also
    # starts those again that were refused here, so whoever holds the root must have been of this job.
    gone = recall(_HOLDER) if is_restart() else ""
    deadline = time.monotonic() + WAIT_SECONDS
    is_waiting = False
    while True:
        try:
            lock = ckptool.hold_root(root, gone=gone)
            remember(_HOLDER, lock.name)
            return lock
        except LockedError as error:
            if time.monotonic() > deadline or stop.received:
                raise
            if not is_waiting:
                say(f"waiting up to {WAIT_SECONDS / 60:.0f} minutes: {error}; {error.hint}")
                is_waiting = True
        time.sleep(_POLL_SECONDS)
