"""States of data loaders, as other systems save them: torch.save files, pickles, JSON, objects of a DCP checkpoint.

What comes back is nested dicts, lists, numbers and texts. Tensors and instances of classes come as inert stand-ins:
nothing of them is read, and nothing of them is run.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.dcp_source import DcpSource
from ckptool.storage import safe_pickle
from ckptool.storage.files import Place, os_errors
from ckptool.storage.safe_pickle import FrozenType, KeyCheckedDict
from ckptool.storage.zip_errors import ZIP_ERRORS

#: Far more than the state of any loader takes; tensors are not counted.
_MAX_STATE_BYTES = 64 << 20
_MAX_DEPTH = 12


class _OrderedDict(KeyCheckedDict, metaclass=FrozenType):
    """collections.OrderedDict."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


class _Namespace(KeyCheckedDict, metaclass=FrozenType):
    """argparse.Namespace, as a dict of its attributes."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            for name, value in state.items():
                self[name] = value


_KNOWN: safe_pickle.Globals = {
    ("collections", "OrderedDict"): _OrderedDict,
    ("argparse", "Namespace"): _Namespace,
    ("types", "SimpleNamespace"): _Namespace,
}


def read_state(path: Path) -> Any:
    """The content of a file of `torch.save` (only its description is read, not its tensors), a pickle, or JSON.

    Raises NotFoundError, DamagedError for a file that is none of these, UnsupportedError for one that is too large.
    """
    with os_errors(path):
        if path.suffix == ".json":
            raw = _limited(path.stat().st_size, path, path.read_bytes)
            try:
                return json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise DamagedError(f"{path} is no JSON: {error}") from error
        if zipfile.is_zipfile(path):
            return unpickle_state(_description(path), str(path))
        return unpickle_state(_limited(path.stat().st_size, path, path.read_bytes), str(path))


def unpickle_state(raw: bytes, location: str) -> Any:
    """The content of a pickle. Raises DamagedError when it is none, UnsafeError for opcodes that states never need."""
    return safe_pickle.load_inert(raw, _KNOWN, location)


def read_objects(path: Place, wanted: Callable[[tuple[str | int, ...]], bool]) -> list[tuple[str, Any]]:
    """The objects of a DCP checkpoint whose keys `wanted` takes, put together again as they were nested before.

    A list of one pair, of the checkpoint's location and the nested dict; empty when there are none.
    """
    state: dict[str | int, Any] = {}
    with contextlib.closing(DcpSource(path)) as source:
        manifest = source.manifest
        for fqn in sorted(manifest.objects):
            keys = manifest.paths.get(fqn) or tuple(fqn.split("."))
            if wanted(keys):
                _put(state, keys, source.load_object(fqn))
    return [(str(path), state)] if state else []


def read_integer(path: Place, fqn: str) -> int | None:
    """An integer tensor of one element in a DCP checkpoint; None when there is no such tensor."""
    with contextlib.closing(DcpSource(path)) as source:
        entry = source.manifest.tensors.get(fqn)
        if entry is None or entry.dtype not in ("int32", "int64") or entry.num_elements != 1:
            return None
        raw = bytearray(entry.itemsize_bytes)
        source.read_into(fqn, entry.chunks[0].box, memoryview(raw))
    return struct.unpack("<i" if len(raw) == 4 else "<q", raw)[0]


def find_dicts(value: Any, has: Callable[[Mapping[str, Any]], bool], name: str = "") -> Iterator[tuple[str, Any]]:
    """All dicts within `value` that `has` takes, outermost ones only, each with the keys that lead to it."""
    pending = [(name, value, 0)]
    while pending:
        at, inner, depth = pending.pop()
        if isinstance(inner, Mapping) and has(inner):
            yield at, inner
        elif depth < _MAX_DEPTH:
            items: Any = inner.items() if isinstance(inner, Mapping) else ()
            if isinstance(inner, list | tuple):
                items = enumerate(inner)
            pending += [(f"{at}.{key}".strip("."), part, depth + 1) for key, part in reversed(list(items))]


def _put(state: dict[str | int, Any], keys: tuple[str | int, ...], value: Any) -> None:
    *outer, last = keys
    for key in outer:
        inner = state.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        state = inner
    state[last] = value


def _description(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.rpartition("/")[2] == "data.pkl"]
            if len(members) != 1 or members[0].compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"{path} is an archive, but not one of torch.save")
            return _limited(members[0].file_size, path, lambda: archive.read(members[0]))
    except ZIP_ERRORS as error:
        raise DamagedError(f"{path} is a damaged archive: {error}") from error


def _limited(num_bytes: int, path: Path, read: Callable[[], bytes]) -> bytes:
    if num_bytes > _MAX_STATE_BYTES:
        raise UnsupportedError(f"{path} describes more than a loader's state: {num_bytes / 1e6:.0f} MB")
    return read()
