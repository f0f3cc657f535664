"""The `torch.save` archive around a chunk, made once per dtype and shape instead of once per chunk.

Archives of tensors of one dtype and shape differ in the payload, in its CRC32 (twice: in the descriptor after the
payload and in the zip's directory) and in `.data/serialization_id`, a fingerprint that nothing checks. So torch writes
the first one, and the rest are its bytes with other payloads. Zip records: APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12.
"""

from __future__ import annotations

import functools
import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

from ckptool.errors import UnsupportedError

_LOCAL_HEADER_BYTES = 30
_DIRECTORY_CRC_OFFSET = 16
_DESCRIPTOR = b"PK\x07\x08"
_DIRECTORY_RECORD = b"PK\x01\x02"


class Writable(Protocol):
    """The one thing that is asked of a file."""

    def write(self, data: Any, /) -> Any: ...


def write_archive(file: Writable, data: memoryview, dtype: str, sizes: tuple[int, ...]) -> None:
    """Append the archive of a contiguous tensor with these bytes."""
    if not data:
        import torch

        torch.save(torch.empty(sizes, dtype=getattr(torch, dtype)), cast(IO[bytes], file))
        return
    template = archive_template(dtype, sizes)
    file.write(template.prefix)
    file.write(data)
    file.write(template.suffix_with(zlib.crc32(data)))


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
    import torch

    file = io.BytesIO()
    # What is in the tensor doesn't matter. Pages that were never written to all share one, so it costs no memory.
    torch.save(torch.empty(sizes, dtype=getattr(torch, dtype)), file)
    raw = file.getvalue()
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        directory = archive.start_dir
    (payload,) = (member for member in members if member.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", raw, payload.header_offset + 26)
    start = payload.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    end = start + payload.file_size
    record = _directory_record(raw, directory, members.index(payload))
    if raw[end : end + 4] != _DESCRIPTOR or raw[record : record + 4] != _DIRECTORY_RECORD:
        raise UnsupportedError(f"torch {torch.__version__} lays out its archives in an unknown way")
    places = (4, record + _DIRECTORY_CRC_OFFSET - end)
    return ArchiveTemplate(raw[:start], raw[end:], places)


def _directory_record(raw: bytes, start: int, index: int) -> int:
    """The position of the index-th record of the zip's directory."""
    for _ in range(index):
        lengths = struct.unpack_from("<HHH", raw, start + 28)
        start += 46 + sum(lengths)
    return start
