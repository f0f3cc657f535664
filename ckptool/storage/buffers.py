"""Memory that bytes pass through on their way: used again, and in huge pages where the kernel has them (madvise(2)).

The first touch of a page costs ten times what a copy into a touched one does, and a conversion writes many files.
"""

from __future__ import annotations

import collections
import contextlib
import mmap

#: How much may wait to be used again.
_MAX_SPARE_BYTES = 64 << 20

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

#: Number of bytes -> buffers of that size. Appending to a deque and popping from it are atomic.
_spare: dict[int, collections.deque[mmap.mmap]] = {}


def take(num_bytes: int) -> mmap.mmap:
    """A buffer of `num_bytes` (at least one), at the start of a page; what is in it is anything."""
    with contextlib.suppress(KeyError, IndexError):
        return _spare[num_bytes].pop()
    # Private: by default Python shares such memory with processes forked later, which would write into it, too.
    made = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _MADV_HUGEPAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            made.madvise(_MADV_HUGEPAGE)
    return made


def give_back(buffer: mmap.mmap) -> None:
    """Let a buffer that nobody reads or writes any more be used again."""
    waiting = _spare.setdefault(len(buffer), collections.deque())
    if sum(size * len(found) for size, found in list(_spare.items())) + len(buffer) <= _MAX_SPARE_BYTES:
        waiting.append(buffer)
