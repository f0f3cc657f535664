"""SIGTERM and SIGUSR1: the machine will be taken away, so save and stop. A second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType

#: Slurm's and Kubernetes' ways to say that the time is up.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Listens while entered; `received` is the first signal's name, "" before.

    The operating system writes each signal's number to a pipe, and a thread of ours reads it: a process that waits
    inside a collective still hears the second signal. Only a main thread can listen; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received = ""

    def __enter__(self) -> StopSignals:
        self._is_listening = threading.current_thread() is threading.main_thread()
        if self._is_listening:
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            # Without a handler the process would end; what matters happens at the other end of the pipe.
            self._old_handlers = {s: signal.signal(s, lambda *_: None) for s in SIGNALS}
            threading.Thread(target=self._listen, args=(self._read_end,), daemon=True, name="signals").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_listening:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wakeup)
            os.close(self._write_end)  # the thread reads the end of the pipe, and ends

    def _listen(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in SIGNALS:
                    self._hear(signal.Signals(number[0]))

    def _hear(self, number: signal.Signals) -> None:
        if self.received:
            os.write(2, f"{number.name} again: stopped at once, nothing saved\n".encode())
            os._exit(128 + number)
        self.received = number.name
        os.write(2, f"{number.name}: saving at the end of this step, then stopping\n".encode())
