"""Writing a DCP checkpoint: every stored box becomes a `torch.save` archive of its own inside a part's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.checkpoint import Manifest
from ckptool.core.collector import no_garbage_collection
from ckptool.core.parts import FileRecord, Part, PlanItem, pack
from ckptool.core.tensors import Chunk, Locator, ObjectEntry, TensorEntry
from ckptool.errors import MismatchError
from ckptool.formats.dcp_archive import ArchiveWriter
from ckptool.formats.dcp_torch import commit, to_torch_metadata
from ckptool.storage.digest import TensorDigest, digest_box
from ckptool.storage.digests_file import FileDigest
from ckptool.storage.direct_file import BLOCK_BYTES, BUFFER_BYTES
from ckptool.storage.files import os_errors
from ckptool.storage.hashing import HashingFile

#: A conversion has about this many files, for workers and ranks to share out, but none too small or too large.
_USUAL_NUM_FILES = 16
_MIN_FILE_BYTES = 64 << 20
_MAX_FILE_BYTES = 2 << 30

#: The files of one part share a file's buffers, down to this for each.
_MIN_BUFFER_BYTES = 256 << 10


def dcp_parts(items: list[PlanItem], num_ranks: int = 1) -> list[Part]:
    """Distribute items over files `__{rank}_{i}.distcp`, dealt to the ranks in turn. There is always at least one."""
    total_bytes = sum(item.write_bytes for item in items)
    file_bytes = min(max(total_bytes // max(_USUAL_NUM_FILES, num_ranks), _MIN_FILE_BYTES), _MAX_FILE_BYTES)
    packs = pack(items, file_bytes) or [[]]
    return [Part((f"__{i % num_ranks}_{i // num_ranks}.distcp",), tuple(packed)) for i, packed in enumerate(packs)]


class DcpSink:
    """A Sink for a DCP checkpoint folder.

    `finish` writes `digests.json` and, last, `.metadata`: whatever else belongs into the folder must be there before.
    `tensors` are the tensors to come (their chunks are not looked at: the boxes written become the chunks), `paths` the
    keys of each fqn in the nested state dict (DCP's planner data), `ties` alias fqn -> canonical fqn; `finish` is the
    first to look at these two. For parts of several files, `file_of(fqn, chunk)` chooses among them; objects go into
    the first one, unless it chooses for them, with None for the chunk.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorEntry],
        paths: Mapping[str, tuple[str | int, ...]],
        ties: Mapping[str, str],
        file_of: Callable[[str, Box | None], str] | None = None,
    ) -> None:
        self._file_of = file_of
        self._folder = folder
        self._tensors = tensors
        self._paths = paths
        self._ties = ties

    def open(self, part: Part) -> DcpPartWriter:
        """Raises StorageError when the disk refuses, as all methods of the writer do."""
        buffer_bytes = max(BUFFER_BYTES // len(part.files), _MIN_BUFFER_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        files = [DcpFile(self._folder / file, self._tensors, buffer_bytes) for file in part.files]
        return DcpPartWriter(files, self._file_of)

    def finish(self, records: Sequence[FileRecord]) -> None:
        """Write `digests.json` and `.metadata`. Raises MismatchError when the boxes don't make whole tensors."""
        with no_garbage_collection():
            self._finish(records)

    def _finish(self, records: Sequence[FileRecord]) -> None:
        chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in self._tensors}
        digests = {fqn: TensorDigest() for fqn in self._tensors}
        for record in records:
            for fqn, written in record.chunks.items():
                chunks[fqn] += written
                digests[fqn] += TensorDigest.parse(record.digests[fqn], record.file)
        tensors = {fqn: TensorEntry(fqn, e.dtype, e.shape, tuple(chunks[fqn])) for fqn, e in self._tensors.items()}
        for fqn, entry in tensors.items():
            fault = exact_cover_fault([chunk.box for chunk in entry.chunks], entry.shape)
            if fault:
                raise MismatchError(f"{self._folder}: {fqn} was not written as planned: {fault}")
        objects = {fqn: ObjectEntry(fqn, locator) for r in records for fqn, locator in r.objects.items()}
        metadata = to_torch_metadata(Manifest(str(self._folder), tensors, objects, self._paths))
        files = {record.file: FileDigest(record.num_bytes, record.blake3) for record in records}
        commit(self._folder, metadata, self._ties, files, digests)


class DcpPartWriter:
    """The files of one part."""

    def __init__(self, files: list[DcpFile], file_of: Callable[[str, Box | None], str] | None) -> None:
        self._files = {file.path.name: file for file in files}
        self._first = files[0]
        self._file_of = file_of

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        self._choose(fqn, chunk).write(fqn, chunk, piece, data)

    def write_object(self, fqn: str, data: bytes) -> None:
        self._choose(fqn, None).write_object(fqn, data)

    def close(self) -> list[FileRecord]:
        return [file.close() for file in self._files.values()]

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()

    def _choose(self, fqn: str, chunk: Box | None) -> DcpFile:
        return self._files[self._file_of(fqn, chunk)] if self._file_of else self._first


class DcpFile:
    """One `.distcp` file being written."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorEntry], buffer_bytes: int) -> None:
        self.path = path
        self._tensors = tensors
        self._chunks: dict[str, list[Chunk]] = {}
        self._objects: dict[str, Locator] = {}
        self._digests: dict[str, TensorDigest] = {}
        self._archive: ArchiveWriter | None = None
        self._archive_start = 0
        with os_errors(self.path):
            self._file = HashingFile(self.path, buffer_bytes)

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        """Append the next piece of a chunk; its archive is complete with its last one."""
        entry = self._tensors[fqn]
        with os_errors(self.path):
            if self._archive is None:
                self._archive_start = self._file.tell()
                self._archive = ArchiveWriter(self._file, entry.dtype, chunk.sizes)
            self._archive.write(data)
            if self._archive.is_complete:
                length = self._file.tell() - self._archive_start
                locator = Locator(self.path.name, self._archive_start, length)
                self._chunks.setdefault(fqn, []).append(Chunk(chunk, locator))
                self._archive = None
        digest = digest_box(data, piece, entry.shape, entry.itemsize_bytes)
        self._digests[fqn] = self._digests.get(fqn, TensorDigest()) + digest

    def write_object(self, fqn: str, data: bytes) -> None:
        """Store a `torch.save` blob as it is."""
        self._objects[fqn] = Locator(self.path.name, self._file.tell(), len(data))
        with os_errors(self.path):
            self._file.write(data)

    def close(self) -> FileRecord:
        """Flush the file to the disk. Raises MismatchError when a chunk was left unfinished."""
        if self._archive is not None:
            raise MismatchError(f"{self.path}: the last chunk was not written whole")
        with os_errors(self.path):
            self._file.close()
        digest = self._file.digest()
        return FileRecord(
            self.path.name,
            digest.num_bytes,
            digest.blake3,
            chunks=self._chunks,
            objects=self._objects,
            digests={fqn: str(d) for fqn, d in self._digests.items()},
        )

    def abandon(self) -> None:
        self._file.abandon()
