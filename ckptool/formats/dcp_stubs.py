"""What may stand in a `.metadata` pickle, and the torch-free stand-ins it becomes.

The classes are torch's (torch/distributed/checkpoint/metadata.py and filesystem.py), under every module name that torch
since 2.0 has written them with. Stand-ins hold whatever the pickle sets on them; formats/dcp_metadata.py checks it.
"""

from __future__ import annotations

import pathlib
from typing import Any

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.tensors import MAX_DIMS
from ckptool.errors import UnsafeError
from ckptool.storage.safe_pickle import FrozenType, Globals, KeyCheckedDict

_INTEGERS = frozenset([int])
_MAX_PATH_PARTS = 256
_MAX_PATH_LENGTH = 4096


class Record(metaclass=FrozenType):
    """Base of the stand-ins: made without arguments, filled by the pickle's attribute dict, compared by identity."""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is only made by unpickling")

    def __new__(cls) -> Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"{type(self).__name__} has a {type(state).__name__} for its fields")
        self.__dict__ = state  # not copied: a pickle can name one large dict very often


class Metadata(Record):
    state_dict_metadata: Any
    storage_data: Any
    planner_data: Any = None
    storage_meta: Any = None


class MetadataIndex(Record):
    fqn: Any
    offset: Any = None


class TensorStorageMetadata(Record):
    properties: Any
    size: Any
    chunks: Any


class ChunkStorageMetadata(Record):
    offsets: Any
    sizes: Any


class BytesStorageMetadata(Record):
    pass


class StorageMeta(Record):
    save_id: Any = None


class StorageInfo(Record):
    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any = None


class TensorProperties(Record):
    """Its state is the tuple that torch's TensorProperties.__getstate__ gives; only the dtype's name is kept."""

    dtype: str

    def __setstate__(self, state: Any) -> None:
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, str):
            raise TypeError("tensor properties without a dtype")
        self.dtype = dtype


class Joined(metaclass=FrozenType):
    """A pathlib path: calling it gives a string."""

    def __new__(cls, *parts: Any) -> Any:
        if len(parts) > _MAX_PATH_PARTS or sum(len(part) for part in parts if isinstance(part, str)) > _MAX_PATH_LENGTH:
            raise TypeError("a path without end")
        return str(pathlib.PurePosixPath(*(part for part in parts if isinstance(part, str))))


class Dims(metaclass=FrozenType):
    """torch.Size: calling it gives a tuple of integers."""

    def __new__(cls, dims: Any = ()) -> Any:
        if type(dims) not in (tuple, list) or len(dims) > MAX_DIMS or not _INTEGERS.issuperset(map(type, dims)):
            raise TypeError("a torch.Size that is no list of integers")
        return tuple(dims)


class Ignored(metaclass=FrozenType):
    """A layout or a memory format, which say nothing about the bytes in a file: calling it gives None."""

    def __new__(cls, argument: Any = None) -> Any:
        return None


class EnumMember(metaclass=FrozenType):
    """getattr as Python 3.11.0 to 3.11.3 pickle an enum member with it: of a memory format, and of nothing else."""

    def __new__(cls, kind: Any, name: Any) -> Any:
        if kind is not Ignored:
            raise UnsafeError("the metadata wants to use getattr, which a checkpoint never needs; nothing was run")


class OrderedDict(metaclass=FrozenType):
    """Calling it gives an empty dict, which the pickle then fills item by item."""

    def __new__(cls) -> Any:
        return KeyCheckedDict()


class Rebuild(metaclass=FrozenType):
    """copyreg._reconstructor, which pickle protocols 0 and 1 make objects with; here only of the stand-ins."""

    def __new__(cls, kind: Any = None, base: Any = None, state: Any = None) -> Any:
        if not (isinstance(kind, type) and issubclass(kind, Record)):
            raise TypeError("only checkpoint records can be rebuilt")
        return kind.__new__(kind)


_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)
_RECORDS: tuple[type[Record], ...] = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    BytesStorageMetadata,
    StorageMeta,
    TensorProperties,
)

#: Understood well enough to be refused by name.
_OTHER_DTYPES = (
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{kind}{num_bits}" for kind in ("int", "uint") for num_bits in range(1, 8)),
)

METADATA_GLOBALS: Globals = {
    **{(module, record.__name__): record for module in _METADATA_MODULES for record in _RECORDS},
    **{
        (module, name): Ignored
        for module in _METADATA_MODULES
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    **{("torch", name): name for name in (*ITEMSIZE_BYTES, *_OTHER_DTYPES)},
    ("torch", "Size"): Dims,
    ("torch.serialization", "_get_layout"): Ignored,
    **{
        (module, name): Joined
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    ("collections", "OrderedDict"): OrderedDict,
    # Protocols 0 to 2 write Python 2's module names.
    **{(module, "_reconstructor"): Rebuild for module in ("copyreg", "copy_reg")},
    **{(module, "object"): Ignored for module in ("builtins", "__builtin__")},
    **{(module, "getattr"): EnumMember for module in ("builtins", "__builtin__")},
}
