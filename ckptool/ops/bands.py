"""Reading boxes that lie side by side in a tensor from one read of the rows that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.interfaces import Source, StoreRange
from ckptool.core.rank_files import band

if TYPE_CHECKING:
    import numpy as np


class BandSource:
    """A Source that keeps the last band read: boxes of one band, asked for one after the other, cost one read.

    Each reading thread has a band of its own. It takes at most what `core.rank_files.pieces` was told.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.manifest = source.manifest
        self._kept = threading.local()

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """As `Source.read_into`."""
        entry = self.manifest.tensors[fqn]
        around = band(box, entry.shape)
        if around == box:
            self._source.read_into(fqn, box, out)
            return
        import numpy as np

        num_bytes = around.num_elements * entry.itemsize_bytes
        buffer: bytearray = getattr(self._kept, "bytes", bytearray())
        if getattr(self._kept, "key", None) != (fqn, around):
            self._kept.key = None
            if len(buffer) < num_bytes:
                self._kept.bytes = buffer = bytearray(num_bytes)
            self._source.read_into(fqn, around, memoryview(buffer)[:num_bytes])
            self._kept.key = fqn, around
        part = box.local_to(around)
        rows = _as_bytes(np.frombuffer(buffer, np.uint8, num_bytes), around, entry.itemsize_bytes)
        target = _as_bytes(np.frombuffer(out, np.uint8), box, entry.itemsize_bytes)
        *sides, (start, end) = zip(part.offsets, part.ends, strict=True)
        columns = slice(start * entry.itemsize_bytes, end * entry.itemsize_bytes)
        target[...] = rows[(*(slice(a, b) for a, b in sides), columns)]

    def ranges(self, fqn: str, box: Box) -> Iterable[StoreRange]:
        return self._source.ranges(fqn, band(box, self.manifest.tensors[fqn].shape))

    def read_object(self, fqn: str) -> bytes:
        return self._source.read_object(fqn)

    def close(self) -> None:
        self._source.close()


def _as_bytes(flat: np.ndarray, box: Box, itemsize_bytes: int) -> np.ndarray:
    """A box's bytes by its dims, the last of which counts bytes: numpy copies those faster than odd-sized items."""
    return flat.reshape((*box.sizes[:-1], box.sizes[-1] * itemsize_bytes))
