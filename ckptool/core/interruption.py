"""Ctrl-C, heard for certain.

Python raises KeyboardInterrupt wherever the main thread happens to be. While libraries load, that is often a place that
swallows it: a callback of the import machinery, a C extension's initialiser, an `except` around an optional import. So
the signal is also noted here, and what must not go on without having heard it asks.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_pressed = threading.Event()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed during the `listening` around this."""
    if _pressed.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Note each SIGINT inside the block, and raise KeyboardInterrupt as Python does.

    Does nothing where somebody else handles the signal, or outside of the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    say_unraisable = sys.unraisablehook

    def note(number: int, frame: FrameType | None) -> None:
        _pressed.set()
        raise KeyboardInterrupt

    def say_others(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            say_unraisable(unraisable)

    _pressed.clear()
    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = say_others
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = say_unraisable
