"""Reading a DCP checkpoint in pieces: any box of any tensor, assembled from the chunks that hold it."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.core.text import gist
from ckptool.errors import DamagedError, UnsafeError
from ckptool.formats.dcp_entry import TAIL_BYTES, StoredTensor, read_entry
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.storage import safe_pickle
from ckptool.storage.crc import PiecewiseCrc32
from ckptool.storage.files import Place
from ckptool.storage.place import place, range_reader
from ckptool.storage.zip_errors import ZIP_ERRORS

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ENTRIES = 4096
_PIECE_BYTES = 16 << 20

#: What torch.save puts before a payload, generously.
_HEAD_BYTES = 4 << 10


class DcpSource:
    """A checkpoint folder as a Source. Reads only the bytes asked for; whole rows where a box takes part of them."""

    def __init__(self, path: Place | str) -> None:
        #: Off for callers who compare digests of all that they read.
        self.check_crc = True
        folder = place(path)
        self.manifest: Manifest = read_manifest(folder)
        self.reader = range_reader(folder)
        self._entries: OrderedDict[Locator, StoredTensor] = OrderedDict()
        self._strided: tuple[Locator, bytearray] | None = None
        self._checksums: dict[Locator, PiecewiseCrc32] = {}
        self._described: set[Locator] = set()

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` (`box.num_elements * itemsize` bytes) with the box's elements in C order.

        Raises DamagedError when the stored bytes are short, differ from the metadata in dtype or shape, or, once every
        byte of a chunk has been read, in whatever pieces, don't have the checksum recorded when they were written.
        """
        entry = self.manifest.tensors[fqn]
        for chunk in entry.chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                self._read_part(entry, chunk, common, box, out.cast("B"))

    def read_chunk_into(self, fqn: str, chunk: Chunk, box: Box, out: memoryview) -> None:
        """As `read_into`, of a box that lies in one stored chunk, which the caller has found."""
        self._read_part(self.manifest.tensors[fqn], chunk, box, box, out.cast("B"))

    def is_turned(self, fqn: str, chunk: Chunk) -> bool:
        """Whether a chunk's elements lie in the file in another order than C's, so that all are read for any."""
        return not self._stored(self.manifest.tensors[fqn], chunk)[1].is_contiguous

    def read_object(self, fqn: str) -> bytes:
        """The stored `torch.save` blob of an object entry."""
        locator = self.manifest.objects[fqn].locator
        if locator is None:
            raise DamagedError(f"{self.manifest.location}: {fqn} is not stored")
        return self.reader.read(locator.file, locator.offset, locator.length)

    def ranges(self, fqn: str, box: Box) -> Iterator[StoreRange]:
        entry = self.manifest.tensors[fqn]
        for chunk in entry.chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                yield from self.chunk_ranges(fqn, chunk, common)

    def chunk_ranges(self, fqn: str, chunk: Chunk, box: Box) -> Iterator[StoreRange]:
        """The same for a box that lies in one stored chunk: its rows, and of a chunk begun with its description."""
        locator, itemsize = chunk.locator, self.manifest.tensors[fqn].itemsize_bytes
        if locator is None:
            return
        num_elements, start = chunk.box.num_elements, 0
        if box != chunk.box:
            part = box.local_to(chunk.box)
            rows = part if part.is_contiguous_in(chunk.box.sizes) else _whole_rows(part, chunk.box.sizes)
            num_elements, start = rows.num_elements, rows.flat_start(chunk.box.sizes) * itemsize
            if locator not in self._entries and locator not in self._described:
                self._described.add(locator)
                tail = max(0, locator.length - TAIL_BYTES)
                yield from self.reader.ranges(locator.file, locator.offset + tail, locator.length - tail)
                if start:
                    yield from self.reader.ranges(locator.file, locator.offset, _HEAD_BYTES)
        # Where in the archive the payload begins is not known before the description was read.
        end = min(locator.length, start + num_elements * itemsize + _HEAD_BYTES)
        yield from self.reader.ranges(locator.file, locator.offset + start, end - start)

    def load_object(self, fqn: str) -> Any:
        """The value of an object entry. Raises UnsafeError when it is more than plain data."""
        return load_blob(self.read_object(fqn), f"{self.manifest.location}: {fqn}")

    def close(self) -> None:
        self.reader.close()

    def _read_part(self, entry: TensorEntry, chunk: Chunk, common: Box, box: Box, out: memoryview) -> None:
        """Copy `common`, the part of `box` that lies in `chunk`, to its place in `out`, which holds all of `box`."""
        locator, stored = self._stored(entry, chunk)
        itemsize = entry.itemsize_bytes
        source, target = common.local_to(chunk.box), common.local_to(box)
        if not stored.is_contiguous:
            stored_view = self._strided_view(locator, stored, itemsize)
            element_view(out, box.sizes, itemsize)[slices(target)].copy_(stored_view[slices(source)])
        elif source.is_contiguous_in(chunk.box.sizes) and target.is_contiguous_in(box.sizes):
            start = target.flat_start(box.sizes) * itemsize
            part = out[start : start + common.num_elements * itemsize]
            self._read_run(locator, stored, source.flat_start(chunk.box.sizes) * itemsize, part, itemsize)
        else:
            self._read_rows(locator, stored, source, target, element_view(out, box.sizes, itemsize))

    def _read_rows(self, locator: Locator, stored: StoredTensor, source: Box, target: Box, out: Tensor) -> None:
        """Read the rows of the chunk that `source` touches, a piece at a time, and copy their part to `target`."""
        itemsize = out.shape[-1]
        row_elements = Box.whole(stored.shape[1:]).num_elements
        rows_at_once = max(1, _PIECE_BYTES // (row_elements * itemsize))
        columns = slices(source)[1:]
        for piece, spot in zip(source.split_rows(rows_at_once), target.split_rows(rows_at_once), strict=True):
            num_rows = piece.sizes[0]
            buffer = memoryview(bytearray(num_rows * row_elements * itemsize))
            self._read_run(locator, stored, piece.offsets[0] * row_elements * itemsize, buffer, itemsize)
            rows = element_view(buffer, (num_rows, *stored.shape[1:]), itemsize)
            out[slices(spot)].copy_(rows[(slice(None), *columns)])

    def _read_run(self, locator: Locator, stored: StoredTensor, start: int, out: memoryview, itemsize: int) -> None:
        """Read contiguous bytes of the tensor, from its byte `start` on."""
        start += stored.storage_offset * itemsize
        self.reader.read_into(locator.file, stored.payload_offset + start, out)
        self._checksum(locator, stored, start, out)

    def _strided_view(self, locator: Locator, stored: StoredTensor, itemsize: int) -> Tensor:
        """A chunk stored transposed, viewed in its logical order; the last one read is kept for the next box."""
        import torch

        kept = self._strided
        if kept is None or kept[0] != locator:
            payload = bytearray(stored.payload_bytes)
            self.reader.read_into(locator.file, stored.payload_offset, memoryview(payload))
            self._checksum(locator, stored, 0, memoryview(payload))
            self._strided = kept = (locator, payload)
        return torch.frombuffer(kept[1], dtype=torch.uint8).as_strided(
            (*stored.shape, itemsize),
            (*(stride * itemsize for stride in stored.stride), 1),
            stored.storage_offset * itemsize,
        )

    def _stored(self, entry: TensorEntry, chunk: Chunk) -> tuple[Locator, StoredTensor]:
        locator = chunk.locator
        if locator is None:
            raise DamagedError(f"{self.manifest.location}: a chunk of {entry.fqn} is not stored")
        stored = self._entries.pop(locator, None) or read_entry(self.reader, locator)
        self._entries[locator] = stored
        if len(self._entries) > _MAX_ENTRIES:
            with contextlib.suppress(KeyError):  # another thread has emptied it
                self._entries.popitem(last=False)
        if (stored.dtype, stored.shape) != (entry.dtype, chunk.box.sizes):
            raise DamagedError(
                f"{self.reader.path_of(locator.file)}: the chunk of {entry.fqn} at byte {locator.offset} is "
                f"{stored.dtype} {list(stored.shape)}, the metadata says {entry.dtype} {list(chunk.box.sizes)}"
            )
        return locator, stored

    def _checksum(self, locator: Locator, stored: StoredTensor, start: int, data: memoryview) -> None:
        """Compare a chunk's checksum with the recorded one as soon as all of its bytes have been read.

        A writer with `torch.serialization.set_crc32_options(False)` records 0, which says nothing.
        """
        if not self.check_crc or stored.crc32 == 0 or not len(data):
            return
        crc32 = self._checksums.setdefault(locator, PiecewiseCrc32(stored.payload_bytes)).add(start, data)
        if crc32 is None:
            return
        self._checksums.pop(locator, None)
        if crc32 != stored.crc32:
            raise DamagedError(
                f"{self.reader.path_of(locator.file)}: the {stored.payload_bytes} bytes at {stored.payload_offset} "
                "have changed since they were written (checksum mismatch)",
                hint="restore the file from another copy, or use another checkpoint",
            )


def _whole_rows(box: Box, shape: tuple[int, ...]) -> Box:
    """The rows of which a box has a part."""
    return Box((box.offsets[0], *(0 for _ in shape[1:])), (box.sizes[0], *shape[1:]))


def load_blob(blob: bytes, name: str) -> Any:
    """Load a `torch.save` blob of plain data.

    Raises UnsafeError when it wants to run code, DamagedError when it is broken.
    """
    import torch

    _check_archive(blob, name)
    try:
        return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message goes on with advice to load it unsafely, which is not passed on.
        culprit = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it wants {culprit[1]})" if culprit else ""
        raise UnsafeError(f"{name} is more than plain data; nothing was run{what}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise DamagedError(f"{name} is damaged: {gist(str(error))}") from error


def _check_archive(blob: bytes, name: str) -> None:
    """Refuse what torch's own reader would unfold: compressed members, and pickles that never end."""
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            members = archive.infolist()
            if len({member.filename for member in members}) != len(members):
                raise DamagedError(f"{name} is damaged: two members of one name")
            if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
                raise DamagedError(f"{name} is damaged: its archive is compressed")
            for member in members:
                if member.filename.endswith("/data.pkl"):
                    safe_pickle.check_plain(archive.read(member), name)
    except ZIP_ERRORS as error:
        raise DamagedError(f"{name} is damaged: not a torch.save archive ({gist(str(error))})") from error


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box's elements in a tensor."""
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def element_view(buffer: memoryview, shape: tuple[int, ...], itemsize: int) -> Tensor:
    """The buffer as a uint8 tensor of `shape + (itemsize,)`: elements are moved without knowing their dtype."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).view(*shape, itemsize)
