"""Reading the tensors of one `torch.save` file of weights (`pytorch_model.bin`, `consolidated.00.pth`) in pieces.

Two forms exist: the zip archive of torch since 1.6, and before it five pickles with the storages after them
(torch/serialization.py, `_legacy_save`). Neither is loaded as a whole: the allow-list unpickler reads what describes
the tensors, and their bytes are then read where they lie. Devices that a file names (cuda:0) mean nothing here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ckptool.core.box import Box
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import Chunk, Locator, TensorEntry, is_possible_shape
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.dcp_entry import _GLOBALS, StoredTensor, _check_extent, _check_pickled, _Pickled, _Storage
from ckptool.storage import safe_pickle
from ckptool.storage.crc import PiecewiseCrc32
from ckptool.storage.files import RangeReader, open_binary, os_errors
from ckptool.storage.safe_pickle import FrozenType, KeyCheckedDict
from ckptool.storage.zip_errors import ZIP_ERRORS

if TYPE_CHECKING:
    from torch import Tensor

#: Far more than the description of any model takes: about 200 bytes a tensor.
_MAX_PICKLE_BYTES = 64 << 20

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NUM_ELEMENTS = struct.Struct("<q")


class _OrderedDict(KeyCheckedDict, metaclass=FrozenType):
    """collections.OrderedDict. Its attributes (`_metadata`, the versions of modules) are left out."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


class _RebuildParameter(metaclass=FrozenType):
    """torch._utils._rebuild_parameter: the tensor inside an nn.Parameter."""

    def __new__(cls, tensor: Any, requires_grad: Any, hooks: Any) -> Any:
        return tensor


_KNOWN: safe_pickle.Globals = {
    **_GLOBALS,
    ("collections", "OrderedDict"): _OrderedDict,
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter,
}


#: What a file holds where these stand for it.
_SHOWN_AS = {_Pickled: "a tensor", _Storage: "a storage"}


class _Payload(NamedTuple):
    """Where a storage's bytes lie in the file, and their CRC32 (0: not known)."""

    offset: int
    num_bytes: int
    crc32: int


class TorchWeights:
    """The tensors of one file: `tensors` are their entries, `read_into` their elements.

    Raises DamagedError when the file is no such file or contradicts itself, UnsafeError when its pickle wants more than
    to describe tensors, UnsupportedError when it holds anything but tensors under names.
    """

    def __init__(self, reader: RangeReader, file: str) -> None:
        self._reader = reader
        self._file = file
        path = reader.path_of(file)
        with os_errors(path), open_binary(path) as opened:
            is_zip = opened.read(len(_ZIP_START)) == _ZIP_START
            self._stored = _read_zip(opened, str(path)) if is_zip else _read_old(opened, str(path))
        self.tensors = {name: _entry(name, file, stored) for name, stored in self._stored.items()}
        self._checked: dict[str, PiecewiseCrc32] = {}
        self._strided: tuple[str, Tensor] | None = None

    def read_into(self, name: str, box: Box, out: memoryview) -> None:
        """Fill `out` with the elements of rows of the tensor, in C order.

        Raises DamagedError when the file is short, or once a tensor that was read from its first to its last byte has
        another checksum than its archive says.
        """
        stored = self._stored[name]
        if not out:
            return
        if not stored.is_contiguous:
            self._copy_strided(name, stored, box, out)
            return
        itemsize = ITEMSIZE_BYTES[stored.dtype]
        start = (stored.storage_offset + box.flat_start(stored.shape)) * itemsize
        self._reader.read_into(self._file, stored.payload_offset + start, out)
        self._check(name, stored, start, out)

    def ranges(self, name: str, box: Box) -> tuple[StoreRange, ...]:
        """What `read_into` will read of a store."""
        stored = self._stored[name]
        if not stored.is_contiguous:
            return ()
        itemsize = ITEMSIZE_BYTES[stored.dtype]
        start = (stored.storage_offset + box.flat_start(stored.shape)) * itemsize
        return self._reader.ranges(self._file, stored.payload_offset + start, box.num_elements * itemsize)

    def _copy_strided(self, name: str, stored: StoredTensor, box: Box, out: memoryview) -> None:
        """A tensor stored transposed is read whole, and kept for the next box."""
        import torch

        kept = self._strided  # one look: other threads read other tensors
        if kept is None or kept[0] != name:
            payload = bytearray(stored.payload_bytes // ITEMSIZE_BYTES[stored.dtype] * ITEMSIZE_BYTES[stored.dtype])
            self._strided = None
            self._reader.read_into(self._file, stored.payload_offset, memoryview(payload))
            self._check(name, stored, 0, memoryview(payload))
            flat = torch.frombuffer(payload, dtype=getattr(torch, stored.dtype))
            kept = (name, flat.as_strided(stored.shape, stored.stride, stored.storage_offset))
            self._strided = kept
        place = tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
        torch.frombuffer(out, dtype=getattr(torch, stored.dtype)).view(box.sizes).copy_(kept[1][place])

    def _check(self, name: str, stored: StoredTensor, start: int, data: memoryview) -> None:
        """Compare a storage's checksum as soon as all of its bytes have been read; 0 says that none was recorded."""
        if stored.crc32 == 0 or not len(data):
            return
        crc32 = self._checked.setdefault(name, PiecewiseCrc32(stored.payload_bytes)).add(start, data)
        if crc32 is not None and crc32 != stored.crc32:
            raise DamagedError(
                f"{self._reader.path_of(self._file)}: the bytes of {name} have changed since they were written "
                "(checksum mismatch)",
                hint="get the file again",
            )


def _entry(name: str, file: str, stored: StoredTensor) -> TensorEntry:
    box = Box.whole(stored.shape)
    locator = Locator(file, stored.payload_offset, stored.payload_bytes)
    return TensorEntry(name, stored.dtype, stored.shape, (Chunk(box, locator),))


def _read_zip(file: BinaryIO, path: str) -> dict[str, StoredTensor]:
    with _damage(path), zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise DamagedError(f"{path}: the archive has two members of one name")
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise DamagedError(f"{path}: the archive has {len(pickles)} data.pkl members, not one")
        prefix = pickles[0].removesuffix("data.pkl")
        byteorder = members.get(f"{prefix}byteorder")
        if byteorder is not None and _read_member(file, byteorder, archive.start_dir) != b"little":
            raise UnsupportedError(f"{path}: stored on a big-endian machine")
        state = safe_pickle.load(
            _read_member(file, members[pickles[0]], archive.start_dir), _KNOWN, path, _persistent_load
        )
        payloads = {
            name.removeprefix(f"{prefix}data/"): _Payload(
                _member_start(file, member, archive.start_dir), member.file_size, member.CRC
            )
            for name, member in members.items()
            if name.startswith(f"{prefix}data/")
        }
    return _place(state, payloads, path)


def _read_member(file: BinaryIO, member: zipfile.ZipInfo, limit: int) -> bytes:
    """The content of a small member. zipfile itself would insist on checksums, which torch can be told not to write."""
    if member.file_size > _MAX_PICKLE_BYTES:
        raise zipfile.BadZipFile(f"{member.filename} has {member.file_size} bytes")
    file.seek(_member_start(file, member, limit))
    content = file.read(member.file_size)
    if member.CRC not in (0, zlib.crc32(content)):
        raise zipfile.BadZipFile(f"{member.filename} has another checksum")
    return content


def _member_start(file: BinaryIO, member: zipfile.ZipInfo, limit: int) -> int:
    """Where a member's bytes begin: after its local header. They must end before the zip's directory, at `limit`."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size != member.compress_size:
        raise zipfile.BadZipFile(f"{member.filename} is compressed or encrypted")
    file.seek(member.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != _ZIP_START or file.read(name_bytes) != member.filename.encode():
        raise zipfile.BadZipFile("its directory and its headers disagree")
    if start + member.file_size > limit:
        raise zipfile.BadZipFile(f"{member.filename} reaches beyond its archive")
    return start


def _read_old(file: BinaryIO, path: str) -> dict[str, StoredTensor]:
    """The form before torch 1.6: magic number, protocol, machine, state and storage keys, each a pickle of its own."""
    file.seek(0)
    raw = file.read(_MAX_PICKLE_BYTES)
    file_bytes = file.seek(0, io.SEEK_END)
    pickles: list[Any] = []
    position = 0
    with _damage(path):
        for _ in range(5):
            end = _end_of_pickle(raw, position)
            pickles.append(safe_pickle.load(raw[position:end], _KNOWN, path, _persistent_load))
            position = end
            if pickles[0] != _MAGIC_NUMBER:
                raise ValueError("no magic number")
        _, version, machine, state, keys = pickles
        if version != _PROTOCOL_VERSION or not isinstance(machine, dict) or type(keys) is not list:
            raise UnsupportedError(f"{path}: torch.save protocol {safe_pickle.describe(version)} is not known")
        if machine.get("little_endian") is not True:
            raise UnsupportedError(f"{path}: stored on a big-endian machine")
        itemsizes = {s.key: ITEMSIZE_BYTES[s.dtype] if s.dtype else 1 for s in _storages(state, path)}
        payloads: dict[str, _Payload] = {}
        for key in keys:
            file.seek(position)
            (num_elements,) = _NUM_ELEMENTS.unpack(file.read(_NUM_ELEMENTS.size))
            num_bytes = num_elements * itemsizes[key]
            position += _NUM_ELEMENTS.size
            if not 0 <= num_bytes <= file_bytes - position:
                raise ValueError(f"it ends at byte {file_bytes}, inside a tensor")
            payloads[key] = _Payload(position, num_bytes, 0)
            position += num_bytes
    return _place(state, payloads, path)


def _end_of_pickle(raw: bytes, start: int) -> int:
    """The position after the pickle that begins at `start`. Nothing of it is run."""
    stream = io.BytesIO(raw)
    stream.seek(start)
    for _ in pickletools.genops(stream):
        pass
    return stream.tell()


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    try:
        yield
    except ZIP_ERRORS as error:
        detail = " ".join(str(error).split())[:200]
        raise DamagedError(f"{path}: not a whole torch.save file ({detail})") from error
    except TypeError as error:  # a storage key that can't be one
        raise DamagedError(f"{path}: not a whole torch.save file") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError(f"{path}: not a whole torch.save file (a place before its start)") from error


def _persistent_load(pid: Any) -> _Storage:
    """A reference to a storage: (kind, dtype, key, device, number of elements[, view of another storage])."""
    kind, dtype, key, _, num_elements, *view = pid
    if view not in ([], [None]):
        raise ValueError("a storage that is a view of another one")
    typed = type(dtype) is str and (dtype in ITEMSIZE_BYTES or not dtype)
    if kind != "storage" or not typed or type(key) is not str or type(num_elements) is not int or num_elements < 0:
        raise ValueError("not a reference to a storage")
    return _Storage(dtype, key, num_elements)


def _tensors(state: Any, path: str) -> dict[str, _Pickled]:
    """The state dict, when it is one: tensors under names."""
    if not isinstance(state, KeyCheckedDict):
        raise UnsupportedError(f"{path} holds {_describe(state)}, not tensors under names")
    for name, value in state.items():
        if type(name) is not str or not isinstance(value, _Pickled):
            raise UnsupportedError(
                f"{path} holds more than tensors: {_describe(name)} is {_describe(value)}",
                hint="save the model's state dict alone: torch.save(model.state_dict(), ...)",
            )
        _check_pickled(value, f"{path}: {name}")
        if not is_possible_shape(value.size):
            raise DamagedError(f"{path}: {name} has an impossible shape")
    return dict(state)


def _describe(value: Any) -> str:
    return _SHOWN_AS.get(type(value)) or safe_pickle.describe(value)


def _storages(state: Any, path: str) -> Iterator[_Storage]:
    for pickled in _tensors(state, path).values():
        yield pickled.storage


def _place(state: Any, payloads: dict[str, _Payload], path: str) -> dict[str, StoredTensor]:
    placed: dict[str, StoredTensor] = {}
    for name, pickled in _tensors(state, path).items():
        payload = payloads.get(pickled.storage.key)
        if payload is None:
            raise DamagedError(f"{path}: the bytes of {name} are not there")
        stored = StoredTensor(
            pickled.dtype,
            tuple(pickled.size),
            tuple(pickled.stride),
            pickled.storage_offset,
            payload.offset,
            payload.num_bytes,
            payload.crc32,
        )
        _check_extent(stored, pickled, f"{path}: {name}")
        placed[name] = stored
    return placed
