"""The `torch.save` archive around a chunk, made once per dtype and shape instead of once per chunk.

Archives of tensors of one dtype and shape differ in the payload, in its CRC32 (twice: in the descriptor after the
payload and in the zip's directory) and in `.data/serialization_id`, a fingerprint that nothing checks. So torch writes
the first one, and the rest are its bytes with other payloads. Zip records: APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12, 4.3.16.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.errors import UnsupportedError
from ckptool.storage.crc import crc32

_DIRECTORY_RECORD = struct.Struct("<28xHHH12x")  # lengths of name, extra field and comment
_DIRECTORY_CRC_OFFSET = 16
_DESCRIPTOR = b"PK\x07\x08"
_END = struct.Struct("<4s8xI6x")  # signature; size of the directory
_ZIP64_END_BYTES, _ZIP64_LOCATOR_BYTES = 56, 20


class Writable(Protocol):
    """The one thing that is asked of a file."""

    def write(self, data: Any, /) -> Any: ...


class ArchiveWriter:
    """Appends the archive of one contiguous tensor to a file; its bytes come in pieces, in C order."""

    def __init__(self, file: Writable, dtype: str, sizes: tuple[int, ...]) -> None:
        """Raises UnsupportedError when this torch lays archives out in another way than known."""
        self._file = file
        self._left_bytes = math.prod(sizes) * ITEMSIZE_BYTES[dtype]
        self._crc32 = 0
        if self._left_bytes:
            self._template = archive_template(dtype, sizes)
            file.write(self._template.prefix)
        else:
            import torch

            torch.save(torch.empty(sizes, dtype=getattr(torch, dtype)), cast(IO[bytes], file))

    @property
    def is_complete(self) -> bool:
        return self._left_bytes == 0

    def write(self, data: memoryview) -> None:
        """Append the next bytes; after the last ones, what ends the archive."""
        if not len(data):
            return
        self._file.write(data)
        self._crc32 = crc32(data, self._crc32)
        self._left_bytes -= len(data)
        if self.is_complete:
            self._file.write(self._template.suffix_with(self._crc32))


@dataclass(frozen=True)
class ArchiveTemplate:
    """What lies before and after the payload, and where in the part after it the CRC32 goes."""

    prefix: bytes
    suffix: bytes
    crc32_places: tuple[int, int]

    def suffix_with(self, crc32: int) -> bytes:
        """The bytes after a payload that has this CRC32."""
        suffix = bytearray(self.suffix)
        for place in self.crc32_places:
            suffix[place : place + 4] = struct.pack("<I", crc32)
        return bytes(suffix)


@functools.lru_cache(maxsize=4096)
def archive_template(dtype: str, sizes: tuple[int, ...]) -> ArchiveTemplate:
    """The archive that `torch.save` makes of a contiguous tensor of these sizes, which has elements.

    Raises UnsupportedError when this torch lays archives out in another way than known.
    """
    import numpy as np
    import torch

    # What is in the tensor doesn't matter, but goes into the archive's fingerprint: zeros make that the same each time.
    # Pages that were never written to all share one, so they cost no memory.
    zeros = np.zeros(math.prod(sizes) * ITEMSIZE_BYTES[dtype], np.uint8)
    tensor = torch.from_numpy(zeros).view(getattr(torch, dtype)).view(sizes)
    recorder = _Recorder(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
    torch.save(tensor, cast(IO[bytes], recorder))
    prefix, suffix = bytes(recorder.before), bytes(recorder.after)
    if not recorder.saw_payload or suffix[:4] != _DESCRIPTOR:
        raise UnsupportedError(f"torch {torch.__version__} lays out its archives in an unknown way")
    return ArchiveTemplate(prefix, suffix, (4, _directory_record(suffix) + _DIRECTORY_CRC_OFFSET))


class _Recorder:
    """Takes what `torch.save` writes and keeps all but the payload, which it hands over in one piece, uncopied."""

    def __init__(self, payload_address: int, payload_bytes: int) -> None:
        self._payload = (payload_address, payload_bytes)
        self.before, self.after = bytearray(), bytearray()
        self.saw_payload = False

    def write(self, data: Any) -> int:
        import numpy as np

        view = memoryview(data).cast("B")
        if len(view) and (np.frombuffer(view, np.uint8).ctypes.data, len(view)) == self._payload:
            self.saw_payload = True
        elif self.saw_payload:
            self.after += view
        else:
            self.before += view
        return len(view)

    def flush(self) -> None:
        pass


def _directory_record(suffix: bytes) -> int:
    """The position of the payload's record in the zip's directory, all of which lies after the payload."""
    end = len(suffix) - _END.size
    directory_bytes = _END.unpack_from(suffix, end)[1]
    if suffix[end - _ZIP64_LOCATOR_BYTES :].startswith(b"PK\x06\x07"):
        end -= _ZIP64_LOCATOR_BYTES + _ZIP64_END_BYTES
    position = end - directory_bytes
    while 0 <= position < end and suffix[position : position + 4] == b"PK\x01\x02":
        lengths = _DIRECTORY_RECORD.unpack_from(suffix, position)
        if suffix[position + _DIRECTORY_RECORD.size :][: lengths[0]].endswith(b"/data/0"):
            return position
        position += _DIRECTORY_RECORD.size + sum(lengths)
    raise UnsupportedError("this torch lays out its archives in an unknown way")
