"""DCP in safetensors: every rank's file holds its parts of tensors, and its header says where they belong.

torch's HuggingFaceStorageWriter writes it with save_distributed=True, as NeMo Automodel does: files
`shard-*-model-*.safetensors`, and in `__metadata__` the key DCP_SHARDING_INFO with `saved_offsets` for each tensor
(torch/distributed/checkpoint/_hf_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.errors import DamagedError, NotFoundError
from ckptool.formats.safetensors_file import read_header
from ckptool.storage.files import Place
from ckptool.storage.place import range_reader

SHARDING_KEY = "DCP_SHARDING_INFO"
FILE_PATTERN = "shard-*.safetensors"
_RANK_NUMBER = re.compile(r"shard-(\d+)-model-")

#: Where NeMo Automodel keeps the config and tokenizer of the model.
SIDE_FOLDER = ".hf_metadata"
_PIECE_BYTES = 8 << 20


def is_sharded_folder(folder: Place) -> bool:
    """True when a folder's weights are such parts. Raises DamagedError for a file that is no safetensors file."""
    first = min(folder.glob(FILE_PATTERN), default=None)
    return first is not None and SHARDING_KEY in read_header(range_reader(folder), first.name)[1]


class ShardedSafetensors:
    """Such a folder as a Source. `folder` is where the config is.

    Raises DamagedError for parts that don't make whole tensors.
    """

    def __init__(self, path: Place) -> None:
        beside = path / SIDE_FOLDER
        self.folder = beside if (beside / "config.json").is_file() else path
        self._reader = range_reader(path)
        files = sorted(file.name for file in path.glob(FILE_PATTERN))
        _check_numbers(path, files)
        #: What to say where no config gives the shapes: tensors reach as far as the parts that are there.
        self.count_note = f"nothing says how many shard files there should be; {len(files)} were found"
        self.notes = [] if (self.folder / "config.json").is_file() else [self.count_note]
        parts: dict[str, list[tuple[str, Chunk]]] = {}
        for file in files:
            for name, dtype, chunk in self._read_file(path / file):
                parts.setdefault(name, []).append((dtype, chunk))
        tensors = {name: _whole(path, name, found) for name, found in parts.items()}
        sizes = {file: (path / file).stat().st_size for file in files}
        # The dots in a name are the model's own: each is one key at the top.
        self.manifest = Manifest(str(path), tensors, paths={name: (name,) for name in tensors}, files=sizes)
        self.manifest.check_cover()

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        import numpy as np

        entry = self.manifest.tensors[fqn]
        itemsize = entry.itemsize_bytes
        target = np.frombuffer(out, dtype=np.uint8).reshape(*box.sizes, itemsize)
        for chunk in entry.chunks:
            common = box.intersect(chunk.box)
            if common is None or chunk.locator is None:
                continue
            stored, place = common.local_to(chunk.box), common.local_to(box)
            if not box.sizes:
                self._reader.read_into(chunk.locator.file, chunk.locator.offset, out)
                continue
            row_bytes = Box.whole(chunk.box.sizes[1:]).num_elements * itemsize
            rows_at_once = max(1, _PIECE_BYTES // max(1, row_bytes))
            for piece, there in zip(stored.split_rows(rows_at_once), place.split_rows(rows_at_once), strict=True):
                buffer = bytearray(piece.sizes[0] * row_bytes)
                start = chunk.locator.offset + piece.offsets[0] * row_bytes
                self._reader.read_into(chunk.locator.file, start, memoryview(buffer))
                rows = np.frombuffer(buffer, dtype=np.uint8).reshape(piece.sizes[0], *chunk.box.sizes[1:], itemsize)
                target[_slices(there)] = rows[(slice(None), *_slices(piece)[1:])]

    def ranges(self, fqn: str, box: Box) -> Iterator[StoreRange]:
        entry = self.manifest.tensors[fqn]
        for chunk in entry.chunks:
            common = box.intersect(chunk.box)
            if common is None or chunk.locator is None:
                continue
            row_bytes = Box.whole(chunk.box.sizes[1:]).num_elements * entry.itemsize_bytes
            first, num_rows = (common.local_to(chunk.box).offsets[0], common.sizes[0]) if box.sizes else (0, 1)
            yield from self._reader.ranges(
                chunk.locator.file, chunk.locator.offset + first * row_bytes, num_rows * row_bytes
            )

    def read_object(self, fqn: str) -> bytes:
        raise NotFoundError(f"{self.manifest.location}: safetensors files hold no objects, so not {fqn}")

    def close(self) -> None:
        self._reader.close()

    def _read_file(self, path: Place) -> list[tuple[str, str, Chunk]]:
        entries, metadata = read_header(self._reader, path.name)
        try:
            info = json.loads(metadata[SHARDING_KEY])
            offsets = {name: tuple(info[name]["saved_offsets"]) for name in entries}
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} does not say where its parts of tensors belong") from error
        found = []
        for name, entry in entries.items():
            corner = offsets[name]
            if len(corner) != len(entry.shape) or not all(type(n) is int and 0 <= n < 1 << 48 for n in corner):
                raise DamagedError(f"{path}: {name} has an impossible place: {list(corner)[:8]}")
            found.append((name, entry.dtype, Chunk(Box(corner, entry.shape), _place(entry))))
        return found


def _check_numbers(path: Place, files: list[str]) -> None:
    """Ranks are counted from 1. One that has nothing to write leaves no file, which can't be told from a lost one, so a
    hole in the numbers is refused. Raises DamagedError."""
    numbers = {int(found[1]) for file in files if (found := _RANK_NUMBER.match(file))}
    absent = sorted(set(range(1, len(numbers) + 1)) - numbers)
    if absent:
        raise DamagedError(
            f"{path}: shard-{absent[0]:05}-model-*.safetensors is not there, and shard-{max(numbers):05} is",
            kind="missing",
        )


def _place(entry: TensorEntry) -> Locator | None:
    return entry.chunks[0].locator


def _whole(path: Place, name: str, parts: list[tuple[str, Chunk]]) -> TensorEntry:
    """The tensor that reaches as far as its parts do: a header doesn't say how large it is."""
    dtypes = {dtype for dtype, _ in parts}
    dims = {len(chunk.box.sizes) for _, chunk in parts}
    if len(dtypes) != 1 or len(dims) != 1:
        raise DamagedError(f"{path}: the parts of {name} differ in dtype or number of dims")
    shape = tuple(max(ends) for ends in zip(*(chunk.box.ends for _, chunk in parts), strict=True))
    return TensorEntry(name, dtypes.pop(), shape, tuple(chunk for _, chunk in parts if chunk.box.num_elements))


def _slices(box: Box) -> tuple[Any, ...]:
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
