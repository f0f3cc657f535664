"""Reading boxes that lie side by side in a tensor from one read of the rows that they share."""

from __future__ import annotations

from ckptool.core.box import Box
from ckptool.core.interfaces import Source
from ckptool.core.rank_files import band


class BandSource:
    """A Source that keeps the last band read: boxes of one band, asked for one after the other, cost one read.

    For one reading thread. A band takes at most what `core.rank_files.pieces` was told.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.manifest = source.manifest
        self._key: tuple[str, Box] | None = None
        self._bytes = bytearray()

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """As `Source.read_into`."""
        entry = self.manifest.tensors[fqn]
        around = band(box, entry.shape)
        if around == box:
            self._source.read_into(fqn, box, out)
            return
        import numpy as np

        num_bytes = around.num_elements * entry.itemsize_bytes
        if self._key != (fqn, around):
            self._key = None
            if len(self._bytes) < num_bytes:
                self._bytes = bytearray(num_bytes)
            self._source.read_into(fqn, around, memoryview(self._bytes)[:num_bytes])
            self._key = fqn, around
        item = np.dtype(f"V{entry.itemsize_bytes}")
        rows = np.frombuffer(self._bytes, dtype=item, count=around.num_elements).reshape(around.sizes)
        part = box.local_to(around)
        target = np.frombuffer(out, dtype=item).reshape(box.sizes)
        target[...] = rows[tuple(slice(start, end) for start, end in zip(part.offsets, part.ends, strict=True))]

    def read_object(self, fqn: str) -> bytes:
        return self._source.read_object(fqn)

    def close(self) -> None:
        self._source.close()
