"""Python's collector of garbage, kept out of work that makes millions of small objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Millions of small objects, none of them garbage: the collector would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # Moves all that is there to the oldest generation, instead of looking at each object three times.
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
