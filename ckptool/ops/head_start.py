"""Copying under a likely plan while the libraries load that tell whether it is the right one.

What a model's tensors are called takes transformers to know, whose import takes as long as copying several gigabytes.
Most models keep their names. So a process of its own (an import needs Python's lock nearly all the time) begins to copy
under that guess, into the staging folder; nothing is published before the plan was made in earnest and found to be the
same one. A wrong guess costs what was written until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ckptool.core.interfaces import Progress
from ckptool.core.parts import FileRecord
from ckptool.errors import CkptoolError, MismatchError, StorageError

Planned = TypeVar("Planned")

#: Copies a plan's parts, telling of its progress.
Copy = Callable[[Progress | None], list[FileRecord]]

#: Runs a copy, with the progress that the callable begins, before or during the block, which gets its records.
Copying = Callable[
    [Copy, Callable[[], Progress | None]], contextlib.AbstractContextManager[Callable[[], list[FileRecord]]]
]

#: Below this a copy is over before it could save anything.
MIN_BYTES = 256 << 20

#: Whose import takes the time.
_SLOW_LIBRARY = "transformers.core_model_loading"

#: Threads that wait for work here, without a lock: those that fetch from stores, and the event loop of their drivers
#: with the threads that look up names. They stay behind in a fork, and `storage.store` opens drivers anew in it.
_IDLE_THREADS = ("range", "fsspecIO", "asyncio")

_REPORT_INTERVAL_SECONDS = 0.1

_PR_SET_PDEATHSIG = 1


class WrongGuess(MismatchError):
    """The plan that was made in earnest is another one."""


def is_worth_it(num_bytes: int) -> bool:
    """Whether planning will take longer than a moment, the copy too, and a process can be forked for it."""
    is_long = num_bytes >= MIN_BYTES and _SLOW_LIBRARY not in sys.modules
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return is_long and sys.platform == "linux" and all(name.startswith(_IDLE_THREADS) for name in others)


def with_head_start(
    guess: Planned,
    make_plan: Callable[[], Planned],
    is_same: Callable[[Planned, Planned], bool],
    carry_out: Callable[[Planned, Callable[[], Planned], Any], list[str]],
) -> tuple[Planned, list[str]]:
    """Carry out `guess` while the plan is made, and the plan itself if it is another; returns it, and notes.

    `carry_out(begun, settled, copying)` copies as `begun` says, as `copying` runs it, and takes everything else from
    `settled()`. Raises what either of them raises.
    """
    made: list[Planned] = []

    def confirmed() -> Planned:
        made.append(make_plan())
        if not is_same(made[0], guess):
            raise WrongGuess("the tensors are stored under other names than the model has")
        return made[0]

    with contextlib.suppress(WrongGuess):
        notes = carry_out(guess, confirmed, beside)
        return made[0], notes
    return made[0], carry_out(made[0], lambda: made[0], at_once)


@contextlib.contextmanager
def at_once(copy: Copy, begin: Callable[[], Progress | None]) -> Iterator[Callable[[], list[FileRecord]]]:
    """Run `copy` with the progress that `begin` gives, then the block, which gets its records when it asks."""
    records = copy(begin())
    yield lambda: records


@contextlib.contextmanager
def beside(copy: Copy, begin: Callable[[], Progress | None]) -> Iterator[Callable[[], list[FileRecord]]]:
    """The same, with `copy` in another process while the block runs; ended with the block, done or not.

    Asking for the records waits, and raises the error of the copy, StorageError when its process died.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_copy, args=(copy, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, about threads: see _IDLE_THREADS
        process.start()
    sender.close()
    outcome: list[Any] = []
    listener = threading.Thread(target=_listen, args=(receiver, begin(), outcome))
    listener.start()

    def records() -> list[FileRecord]:
        listener.join()
        if not outcome:
            raise StorageError("the process that copies has died", hint="out of memory?")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    try:
        yield records
    finally:
        process.kill()
        process.join()
        listener.join()
        receiver.close()


def _listen(receiver: Connection, report: Progress | None, outcome: list[Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(said := receiver.recv(), list | BaseException):
            if report:
                report(said)
        outcome.append(said)


def _copy(copy: Copy, sender: Connection) -> None:
    """In the new process: copy, tell of it, and end with the one that wants it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lock = threading.Lock()
    unsaid_bytes = 0
    last_s = time.monotonic()

    def report(num_bytes: int) -> None:
        nonlocal unsaid_bytes, last_s
        with lock:
            unsaid_bytes += num_bytes
            # Each message takes Python's lock from the import.
            if time.monotonic() - last_s >= _REPORT_INTERVAL_SECONDS:
                sender.send(unsaid_bytes)
                unsaid_bytes, last_s = 0, time.monotonic()

    try:
        outcome: Any = copy(report)
    except CkptoolError as error:
        outcome = error
    except MemoryError:
        outcome = MemoryError()
    except Exception as error:
        outcome = RuntimeError(f"{type(error).__name__}: {error}")
    sender.send(unsaid_bytes)
    sender.send(outcome)
