"""A limit on bytes a second, shared by threads."""

from __future__ import annotations

import threading
import time


class RateLimit:
    """Holds up whoever moves bytes, so that all together don't move more than so many a second; 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def take(self, num_bytes: int) -> None:
        """Return when `num_bytes` may have been moved."""
        if not self.bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self.bytes_per_s
            wait_s = self._free_at_s - now_s
        time.sleep(wait_s)
