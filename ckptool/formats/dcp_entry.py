"""One stored chunk of a DCP checkpoint: a `torch.save` archive of a tensor, and where its payload lies in the file.

The archive is a zip of uncompressed members: `*/data.pkl` describes the tensor, `*/data/0` is its storage.
Only the zip's directory, its headers and `data.pkl` are read here, a few KB per entry; never the payload.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.tensors import MAX_DIMS, Locator
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.dcp_stubs import DIMS, Ignored
from ckptool.storage import safe_pickle
from ckptool.storage.files import RangeReader
from ckptool.storage.safe_pickle import FrozenType
from ckptool.storage.zip_errors import ZIP_ERRORS

_MAX_READ_BYTES = 16 << 10  # far more than the description of one tensor takes
TAIL_BYTES = 2048
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_RECORD_BYTES = 46  # of the zip's directory, without the name, extra field and comment whose lengths it holds
_RECORD_LENGTHS = struct.Struct("<28xHHH12x")
_RECORD_CRC_OFFSET = 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor at rest. `payload_offset` is where its storage begins in the file, `payload_bytes` how long that is;
    the tensor starts `storage_offset` elements into it and `stride` counts elements. `crc32` covers the storage."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_bytes: int
    crc32: int

    @property
    def is_contiguous(self) -> bool:
        """True when the elements lie in C order without gaps (dims of size 1 may have any stride)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected:
                    return math.prod(self.shape) == 0
                expected *= size
        return True


def read_entry(reader: RangeReader, locator: Locator) -> StoredTensor:
    """Find the tensor stored at `locator`.

    Raises DamagedError when the bytes there are not such an archive or contradict themselves, UnsafeError when its
    pickle wants more than to describe a tensor, UnsupportedError for tensors that this project can't carry faithfully.
    """
    for sample in _samples.get(locator.length, ()):
        stored = sample.read_alike(reader, locator)
        if stored is not None:
            return stored
    name = f"{reader.path_of(locator.file)} at byte {locator.offset}"
    window = _Window(reader, locator)
    try:
        with zipfile.ZipFile(window) as archive:
            stored = _read_archive(archive, window, locator, name)
            with contextlib.suppress(*ZIP_ERRORS):
                _keep_sample(archive, window, locator, stored)
            return stored
    except ZIP_ERRORS as error:
        raise DamagedError(f"{name}: not a whole torch.save archive ({error})") from error


@dataclass(frozen=True, slots=True)
class _Sample:
    """An archive that was read and found good. Another one with the same bytes around its payload is as good.

    `head` is all before the payload and `tail` all after it, with zeros in the places `free`, where archives of one
    dtype and shape differ: the payload's CRC32 (`crc32`: where the directory has it), torch's fingerprint and its own.
    """

    stored: StoredTensor
    head: bytes
    tail: bytes
    free: tuple[slice, ...]
    crc32: slice

    def read_alike(self, reader: RangeReader, locator: Locator) -> StoredTensor | None:
        """The tensor at `locator`, whose archive has the sample's length; None when it is of another kind."""
        if reader.read(locator.file, locator.offset, len(self.head)) != self.head:
            return None
        tail = reader.read(locator.file, locator.offset + locator.length - len(self.tail), len(self.tail))
        if _blanked(tail, self.free) != self.tail:
            return None
        crc32 = int.from_bytes(tail[self.crc32], "little")
        return replace(self.stored, payload_offset=locator.offset + len(self.head), crc32=crc32)


#: By an archive's length, the latest of each kind; a checkpoint has thousands of chunks and a few kinds.
_samples: dict[int, tuple[_Sample, ...]] = {}
_MAX_LENGTHS = 256
_MAX_KINDS = 4


def _keep_sample(archive: zipfile.ZipFile, window: _Window, locator: Locator, stored: StoredTensor) -> None:
    """Remember an archive by which others can be recognised. Raises what an unusual one makes zipfile raise."""
    start = stored.payload_offset - locator.offset
    end = start + stored.payload_bytes
    if start > _MAX_READ_BYTES or locator.length - end > TAIL_BYTES or not stored.payload_bytes:
        return
    free: list[slice] = []
    crc32 = None
    record = archive.start_dir
    for member in archive.infolist():
        content = _payload_start(window, member)
        in_directory = slice(record - end + _RECORD_CRC_OFFSET, record - end + _RECORD_CRC_OFFSET + 4)
        after = content + member.file_size - end
        if content == start and member.file_size:
            crc32 = in_directory
            free += [in_directory, slice(after + 4, after + 8)]
        elif member.filename.endswith("/.data/serialization_id"):
            free += [in_directory, slice(content - end, after), slice(after + 4, after + 8)]
        window.seek(record)
        record += _RECORD_BYTES + sum(_RECORD_LENGTHS.unpack(window.read(_RECORD_BYTES)))
    window.seek(0)
    head = window.read(start)
    window.seek(end)
    tail = window.read(locator.length - end)
    if crc32 is None or any(place.start < 0 for place in free) or int.from_bytes(tail[crc32], "little") != stored.crc32:
        return
    if len(_samples) >= _MAX_LENGTHS:
        _samples.clear()
    sample = _Sample(stored, head, _blanked(tail, free), tuple(free), crc32)
    _samples[locator.length] = (sample, *_samples.get(locator.length, ()))[:_MAX_KINDS]


def _blanked(raw: bytes, places: Iterable[slice]) -> bytes:
    blanked = bytearray(raw)
    for place in places:
        blanked[place] = bytes(place.stop - place.start)
    return bytes(blanked)


class _Pickled(NamedTuple):
    """What data.pkl says; anything may be of any type until it was checked."""

    storage: Any
    storage_offset: Any
    size: Any
    stride: Any
    dtype: Any
    view_bits: Any


class _RebuildTyped(metaclass=FrozenType):
    """torch._utils._rebuild_tensor_v2 (and the older _rebuild_tensor): the storage has the dtype."""

    def __new__(
        cls, storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, hooks: Any = None, bits: Any = None
    ) -> Any:
        return _Pickled(storage, offset, size, stride, getattr(storage, "dtype", None), bits)


class _RebuildUntyped(metaclass=FrozenType):
    """torch._utils._rebuild_tensor_v3: an untyped storage, the dtype given beside it."""

    def __new__(
        cls, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        return _Pickled(storage, offset, size, stride, dtype, bits)


_STORAGE_DTYPES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}

_GLOBALS: safe_pickle.Globals = {
    ("torch._utils", "_rebuild_tensor"): _RebuildTyped,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTyped,
    ("torch._utils", "_rebuild_tensor_v3"): _RebuildUntyped,
    **{("torch", storage): dtype for storage, dtype in _STORAGE_DTYPES.items()},
    **{("torch", dtype): dtype for dtype in ITEMSIZE_BYTES},
    ("torch.storage", "UntypedStorage"): "",
    ("torch", "Size"): DIMS,
    ("collections", "OrderedDict"): Ignored,
}


class _Storage(NamedTuple):
    """A reference to a storage. `dtype` is "" for an untyped one, whose elements are bytes."""

    dtype: str
    key: str
    num_elements: int


def _persistent_load(pid: Any) -> _Storage:
    kind, dtype, key, _, num_elements = pid
    texts = type(dtype) is str and type(key) is str and dtype in ("", *_STORAGE_DTYPES.values())
    if kind != "storage" or not texts or type(num_elements) is not int or num_elements < 0:
        raise ValueError("not a reference to a storage")
    return _Storage(dtype, key, num_elements)


def _read_archive(archive: zipfile.ZipFile, window: _Window, locator: Locator, name: str) -> StoredTensor:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise DamagedError(f"{name}: the archive has two members of one name")
    pickles = [member for member in members if member.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DamagedError(f"{name}: the archive has {len(pickles)} data.pkl members, not one")
    prefix = pickles[0].removesuffix("data.pkl")
    byteorder = members.get(f"{prefix}byteorder")
    if byteorder is not None and _read_member(window, byteorder) != b"little":
        raise UnsupportedError(f"{name}: stored on a big-endian machine")
    pickled = safe_pickle.load(_read_member(window, members[pickles[0]]), _GLOBALS, name, _persistent_load)
    _check_pickled(pickled, name)
    member = members.get(f"{prefix}data/{pickled.storage.key}")
    if member is None:
        raise DamagedError(f"{name}: the archive lacks its tensor's storage")
    start = _payload_start(window, member)
    # The zip's directory comes after all members, so a payload that reaches into it is a lie.
    if start + member.file_size > archive.start_dir:
        raise DamagedError(f"{name}: the storage reaches beyond its archive")
    stored = StoredTensor(
        dtype=pickled.dtype,
        shape=tuple(pickled.size),
        stride=tuple(pickled.stride),
        storage_offset=pickled.storage_offset,
        payload_offset=locator.offset + start,
        payload_bytes=member.file_size,
        crc32=member.CRC,
    )
    _check_extent(stored, pickled, name)
    return stored


def _check_pickled(pickled: Any, name: str) -> None:
    if not isinstance(pickled, _Pickled) or not isinstance(pickled.storage, _Storage):
        raise DamagedError(f"{name}: the archive holds something other than one tensor")
    dims, strides = pickled.size, pickled.stride
    if not (type(dims) is type(strides) is tuple and len(dims) == len(strides) <= MAX_DIMS):
        raise DamagedError(f"{name}: the archive describes an impossible tensor")
    numbers = [pickled.storage_offset, *dims, *strides]
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise DamagedError(f"{name}: the archive describes an impossible tensor")
    if type(pickled.dtype) is not str or pickled.dtype not in ITEMSIZE_BYTES:
        raise DamagedError(f"{name}: the archive describes a tensor without a dtype")
    if pickled.view_bits:
        raise UnsupportedError(f"{name}: the tensor is stored as a conjugate or negative view")


def _check_extent(stored: StoredTensor, pickled: _Pickled, name: str) -> None:
    """The storage must have the size that data.pkl claims, and the tensor must lie inside it."""
    itemsize = ITEMSIZE_BYTES[stored.dtype]
    storage_dtype = pickled.storage.dtype
    claimed = pickled.storage.num_elements * (ITEMSIZE_BYTES[storage_dtype] if storage_dtype else 1)
    if claimed != stored.payload_bytes:
        raise DamagedError(f"{name}: the storage has {stored.payload_bytes} bytes, its description says {claimed}")
    if 0 not in stored.shape:
        last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.stride, strict=True))
        if (stored.storage_offset + last + 1) * itemsize > stored.payload_bytes:
            raise DamagedError(f"{name}: the tensor is larger than its storage")


def _read_member(window: _Window, member: zipfile.ZipInfo) -> bytes:
    """The content of a small member. zipfile itself would insist on checksums, which torch can be told not to write."""
    window.seek(_payload_start(window, member))
    content = window.read(member.file_size)
    if member.CRC not in (0, zlib.crc32(content)):
        raise zipfile.BadZipFile(f"{member.filename} has another checksum")
    return content


def _payload_start(window: _Window, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin in the archive: after its local header, whose padding the directory doesn't know."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size != member.compress_size:
        raise zipfile.BadZipFile(f"{member.filename} is compressed or encrypted")
    window.seek(member.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04" or window.read(name_bytes) != member.filename.encode():
        raise zipfile.BadZipFile("its directory and its headers disagree")
    return member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes


class _Window(io.RawIOBase):
    """The bytes of one locator as a read-only file that fetches its tail once and refuses to be read in bulk."""

    def __init__(self, reader: RangeReader, locator: Locator) -> None:
        self._reader = reader
        self._locator = locator
        self._position = 0
        self._tail_start = max(0, locator.length - TAIL_BYTES)
        self._tail = self._fetch(self._tail_start, locator.length)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._locator.length}[whence]
        if base + offset < 0:
            raise ValueError("it is cut short")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._locator.length if size < 0 else min(self._position + size, self._locator.length)
        start = min(self._position, end)
        if end - start > _MAX_READ_BYTES:
            raise ValueError(f"{end - start} bytes of description for one tensor")
        self._position = end
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        return self._fetch(start, end)

    def _fetch(self, start: int, end: int) -> bytes:
        return self._reader.read(self._locator.file, self._locator.offset + start, end - start)
