"""Reading beside the work on what was read: a thread stays a few pieces ahead, so that neither waits for the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

#: Pieces that fit into a core's cache: what was just read is still there when it is worked on.
PIECE_BYTES = 256 << 10
_NUM_PIECES = 16


def read_ahead(read: Callable[[memoryview], int], num_bytes: int) -> Iterator[memoryview]:
    """What `read` gives, in pieces; each is valid until the next one is asked for.

    `read(buffer)` fills the buffer from its start and returns how many bytes that were, 0 at the end. It is called from
    another thread, one call at a time, unless the `num_bytes` to expect are too few for that. Errors of `read` are
    raised here, in their turn.
    """
    if num_bytes <= 4 * PIECE_BYTES:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, num_bytes))))
        while count := read(buffer):
            yield buffer[:count]
        return
    free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
    filled: queue.SimpleQueue[memoryview | BaseException] = queue.SimpleQueue()
    for _ in range(_NUM_PIECES):
        free.put(memoryview(bytearray(PIECE_BYTES)))
    thread = threading.Thread(target=_fill, args=(read, free, filled), name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            piece = filled.get()
            if isinstance(piece, BaseException):
                raise piece
            if not piece:
                return
            yield piece
            free.put(memoryview(piece.obj))
    finally:
        free.put(None)
        thread.join()


def _fill(
    read: Callable[[memoryview], int],
    free: queue.SimpleQueue[memoryview | None],
    filled: queue.SimpleQueue[memoryview | BaseException],
) -> None:
    try:
        while (buffer := free.get()) is not None:
            count = read(buffer)
            filled.put(buffer[:count])
            if not count:
                return
    except BaseException as error:
        filled.put(error)
