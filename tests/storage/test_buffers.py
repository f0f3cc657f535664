from __future__ import annotations

import multiprocessing

from ckptool.storage import buffers

SIZE_BYTES = 1 << 16


def _overwrite() -> None:
    buffers.take(SIZE_BYTES)[:4] = b"them"


def test_a_buffer_that_waits_is_not_shared_with_a_forked_process() -> None:
    buffer = buffers.take(SIZE_BYTES)
    buffer[:4] = b"ours"
    buffers.give_back(buffer)
    process = multiprocessing.get_context("fork").Process(target=_overwrite)
    process.start()
    process.join()
    assert process.exitcode == 0
    again = buffers.take(SIZE_BYTES)
    assert again is buffer and again[:4] == b"ours"


def test_no_more_waits_than_is_allowed() -> None:
    taken = [buffers.take(32 << 20) for _ in range(4)]
    for buffer in taken:
        buffers.give_back(buffer)
    waiting = sum(size * len(found) for size, found in buffers._spare.items())
    assert waiting <= buffers._MAX_SPARE_BYTES
