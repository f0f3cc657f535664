"""Writing Hugging Face folders: safetensors shards, each from its first byte to its last, and their index."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ckptool.core.box import Box
from ckptool.core.parts import FileRecord, Part, PlanItem, pack
from ckptool.errors import MismatchError, StorageError, UnsupportedError
from ckptool.formats.hf_folder import INDEX_NAME, SINGLE_NAME
from ckptool.formats.safetensors_file import build_header, layout_order, read_header
from ckptool.storage.files import RangeReader, os_errors, write_json
from ckptool.storage.hashing import HashingFile


def hf_parts(items: list[PlanItem], max_shard_bytes: int) -> list[Part]:
    """Distribute items over files in their given order: a new one when the next item would pass the limit.

    The names are transformers': `model.safetensors`, or `model-00001-of-0000N.safetensors`. Within a file the items are
    in the order of its layout.
    """
    packs = pack(items, max_shard_bytes) or [[]]
    many = len(packs) > 1
    names = [f"model-{i:05}-of-{len(packs):05}.safetensors" if many else SINGLE_NAME for i in range(1, len(packs) + 1)]
    return [Part((name,), layout(packed)) for name, packed in zip(names, packs, strict=True)]


def layout(items: Sequence[PlanItem]) -> tuple[PlanItem, ...]:
    """Items in the order in which their tensors lie in a file: that of the safetensors library, groups kept together.

    A group's tensors have one dtype, so that, as the library wants, no tensor follows a narrower one.
    """
    return tuple(sorted(items, key=lambda item: min(layout_order(entry) for entry in item.targets)))


class HfSink:
    """Writes safetensors files into a staging folder."""

    def __init__(self, folder: Path, parts: Sequence[Part]) -> None:
        self._folder = folder
        self._parts = parts

    def open(self, part: Part) -> SafetensorsWriter:
        (file,) = part.files
        return SafetensorsWriter(self._folder / file, part)

    def finish(self, records: Sequence[FileRecord]) -> None:
        """Write the index when there is more than one file."""
        if len(self._parts) > 1:
            entries = [(e, part.files[0]) for part in self._parts for item in part.items for e in item.targets]
            record = {
                "metadata": {"total_size": sum(entry.num_bytes for entry, _ in entries)},
                "weight_map": dict(sorted((entry.fqn, file) for entry, file in entries)),
            }
            write_json(self._folder / INDEX_NAME, record)


class SafetensorsWriter:
    """One safetensors file. Tensors, and the pieces of each, must come in the order of the part."""

    def __init__(self, path: Path, part: Part) -> None:
        """Raises UnsupportedError for a dtype that safetensors can't hold, StorageError when the disk refuses."""
        self._path = path
        header, self._offsets = build_header([entry for item in part.items for entry in item.targets])
        self._entries = {entry.fqn: entry for item in part.items for entry in item.targets}
        last = max(((self._offsets[fqn] + e.num_bytes) for fqn, e in self._entries.items()), default=len(header))
        self._file_bytes = last
        with os_errors(path):
            self._file = HashingFile(path)
            self._file.write(header)

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        """Raises MismatchError when it is not the next piece of the file."""
        entry = self._entries[fqn]
        place = self._offsets[fqn] + piece.flat_start(entry.shape) * entry.itemsize_bytes
        if len(data) and (place != self._file.tell() or not piece.is_contiguous_in(entry.shape)):
            raise MismatchError(f"{self._path}: a piece of {fqn} came out of order")
        with os_errors(self._path):
            self._file.write(data)

    def write_object(self, fqn: str, data: bytes) -> None:
        raise UnsupportedError(f"safetensors files can't hold the object {fqn}")

    def close(self) -> list[FileRecord]:
        """Flush the file to the disk and read its header back. Raises MismatchError when it is not whole."""
        if self._file.tell() != self._file_bytes:
            raise MismatchError(f"{self._path}: {self._file.tell()} of {self._file_bytes} bytes were written")
        with os_errors(self._path):
            self._file.close()
        self._read_back()
        digest = self._file.digest()
        return [FileRecord(self._path.name, digest.num_bytes, digest.blake3)]

    def abandon(self) -> None:
        self._file.abandon()

    def _read_back(self) -> None:
        with contextlib.closing(RangeReader(self._path.parent)) as reader:
            entries, _ = read_header(reader, self._path.name)
        written = {fqn: (entry.dtype, entry.shape) for fqn, entry in self._entries.items()}
        if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} != written:
            raise StorageError(f"{self._path}: what was written does not read back as it should")
