"""What may stand in a `.metadata` pickle, and the torch-free stand-ins it becomes.

The classes are torch's (torch/distributed/checkpoint/metadata.py and filesystem.py), under every module name that torch
since 2.0 has written them with. They are for safe_pickle.load_flat, and hold whatever the pickle sets on them;
formats/dcp_metadata.py checks it.
"""

from __future__ import annotations

import pathlib
from typing import Any

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.errors import UnsafeError
from ckptool.storage.safe_pickle import FrozenType, Globals, pairs

_MAX_FIELDS = 64

# What the three most frequent records are written with.
_INDEX_FIELDS = ["fqn", "index", "offset"]
_CHUNK_FIELDS = ["offsets", "sizes"]
_PLACE_FIELDS = ["relative_path", "offset", "length"]
_MAX_PATH_PARTS = 256
_MAX_PATH_LENGTH = 4096


class Record(metaclass=FrozenType):
    """Base of the stand-ins: made without arguments; the fields that are read are slots, any of which may be absent."""

    __slots__ = ()

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is only made by unpickling")

    def __setstate__(self, state: Any) -> None:
        """Take the fields from a flat list (see safe_pickle.load_flat), and empty it: the unpickler keeps a million."""
        if type(state) is not list or len(state) > 2 * _MAX_FIELDS:
            raise TypeError(f"{type(self).__name__} has a {type(state).__name__} for its fields, or too many of them")
        for name, value in pairs(state):
            if type(name) is str and name in self.__slots__:
                setattr(self, name, value)
        state.clear()

    def __getattr__(self, name: str) -> Any:
        """None for a field that is not there."""
        if name not in self.__slots__:
            raise AttributeError(name)
        return None


class Metadata(Record):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "storage_meta")


class MetadataIndex(Record):
    __slots__ = ("fqn", "index", "offset")

    def __setstate__(self, state: Any) -> None:
        if state[::2] == _INDEX_FIELDS:
            _, self.fqn, _, self.index, _, self.offset = state
            state.clear()
        else:
            super().__setstate__(state)


class TensorStorageMetadata(Record):
    __slots__ = ("chunks", "properties", "size")


class ChunkStorageMetadata(Record):
    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: Any) -> None:
        if state[::2] == _CHUNK_FIELDS:
            _, self.offsets, _, self.sizes = state
            state.clear()
        else:
            super().__setstate__(state)


class BytesStorageMetadata(Record):
    __slots__ = ()


class StorageMeta(Record):
    __slots__ = ("save_id",)


class StorageInfo(Record):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")

    def __setstate__(self, state: Any) -> None:
        if state[::2] == _PLACE_FIELDS:
            _, self.relative_path, _, self.offset, _, self.length = state
            state.clear()
        else:
            super().__setstate__(state)


class TensorProperties(Record):
    """Its state is the tuple that torch's TensorProperties.__getstate__ gives; only the dtype's name is kept."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: Any) -> None:
        dtype = state[0] if type(state) is tuple and state else None
        if type(dtype) is not str:
            raise TypeError("tensor properties without a dtype")
        self.dtype = dtype


class Joined(metaclass=FrozenType):
    """A pathlib path: calling it gives a string."""

    def __new__(cls, *parts: Any) -> Any:
        if len(parts) > _MAX_PATH_PARTS or sum(len(part) for part in parts if isinstance(part, str)) > _MAX_PATH_LENGTH:
            raise TypeError("a path without end")
        return str(pathlib.PurePosixPath(*(part for part in parts if isinstance(part, str))))


#: torch.Size: a method of C, since there are two calls of it a chunk. The empty tuple and a tuple make that same tuple,
#: without a copy; all else is refused. What is in the tuple is looked at by who reads it.
DIMS = ().__add__


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
    """Calling it gives an empty dict, as `load_flat` has it, which the pickle then fills."""

    def __new__(cls) -> Any:
        return []


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
    (
        "olmo_core.distributed.checkpoint.filesystem",
        "_StorageInfo",
    ): StorageInfo,  # a class of its own with the same fields
    **{("torch", name): name for name in (*ITEMSIZE_BYTES, *_OTHER_DTYPES)},
    ("torch", "Size"): DIMS,
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
