"""How much memory threads may hold together, and whether they should go on at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Cancelled(Exception):
    """Raised in a thread whose work another thread's error has made useless."""


class MemoryBudget:
    """At most `total_bytes` are reserved at a time (None: no limit); a larger single reservation waits to be alone."""

    def __init__(self, total_bytes: int | None) -> None:
        self.total_bytes = total_bytes
        self._reserved_bytes = 0
        self._changed = threading.Condition()
        self._cancelled = False

    @contextlib.contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Hold `num_bytes` for the length of the block, waiting for others to give theirs back. Raises Cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._fits(num_bytes))
            self.check_going_on()
            self._reserved_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._reserved_bytes -= num_bytes
                self._changed.notify_all()

    def cancel(self) -> None:
        """Make every thread that asks or waits here stop."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def check_going_on(self) -> None:
        if self._cancelled:
            raise Cancelled

    def _fits(self, num_bytes: int) -> bool:
        free = self.total_bytes is None or self._reserved_bytes + num_bytes <= self.total_bytes
        return free or self._reserved_bytes == 0
