"""Writing a DCP checkpoint from one process: every box becomes a stored chunk, a `torch.save` archive of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, Locator, ObjectEntry, TensorEntry
from ckptool.errors import MismatchError
from ckptool.formats.dcp_archive import write_archive
from ckptool.formats.dcp_torch import commit, to_torch_metadata
from ckptool.storage.digest import TensorDigest, digest_box
from ckptool.storage.digests_file import FileDigest
from ckptool.storage.files import os_errors
from ckptool.storage.hashing import HashingFile


class DcpSink:
    """A Sink that appends to `__0_{i}.distcp` files of about `max_file_bytes`.

    `finish` writes `digests.json` and, last, `.metadata`: whatever else belongs into the folder must be there before.
    `tensors` are the tensors to come (their chunks, if any, are not looked at: the boxes written become the chunks),
    `paths` the keys of each fqn in the nested state dict (DCP's planner data), `ties` alias fqn -> canonical fqn.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorEntry],
        paths: Mapping[str, tuple[str | int, ...]],
        ties: Mapping[str, str],
        max_file_bytes: int = 2 << 30,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._paths = paths
        self._ties = ties
        self._max_file_bytes = max_file_bytes
        self._chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in tensors}
        self._objects: dict[str, ObjectEntry] = {}
        self._num_files = 0
        self._file: HashingFile | None = None
        self._file_digests: dict[str, FileDigest] = {}
        self._digests = {fqn: TensorDigest() for fqn in tensors}

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Store a box's elements, given in C order. Raises StorageError when the disk refuses."""
        entry = self._tensors[fqn]
        with os_errors(self._folder):
            file = self._open_file()
            start = file.tell()
            write_archive(file, data, entry.dtype, box.sizes)
            locator = Locator(self._file_name(), start, file.tell() - start)
        self._chunks[fqn].append(Chunk(box, locator))
        self._digests[fqn] += digest_box(data, box, entry.shape, entry.itemsize_bytes)

    def write_object(self, fqn: str, data: bytes) -> None:
        """Store a `torch.save` blob as it is."""
        with os_errors(self._folder):
            file = self._open_file()
            locator = Locator(self._file_name(), file.tell(), len(data))
            file.write(data)
        self._objects[fqn] = ObjectEntry(fqn, locator)

    def finish(self) -> None:
        """Write `digests.json` and `.metadata`. Raises MismatchError when the boxes don't make whole tensors."""
        self._close_file()
        tensors = {
            fqn: TensorEntry(fqn, entry.dtype, entry.shape, tuple(self._chunks[fqn]))
            for fqn, entry in self._tensors.items()
        }
        for fqn, entry in tensors.items():
            fault = exact_cover_fault([chunk.box for chunk in entry.chunks], entry.shape)
            if fault:
                raise MismatchError(f"{self._folder}: {fqn} was not written as planned: {fault}")
        metadata = to_torch_metadata(Manifest(str(self._folder), tensors, self._objects, self._paths))
        commit(self._folder, metadata, self._ties, self._file_digests, self._digests)

    def _open_file(self) -> HashingFile:
        if self._file is not None and self._file.tell() >= self._max_file_bytes:
            self._close_file()
        if self._file is None:
            self._num_files += 1
            self._file = HashingFile((self._folder / self._file_name()).open("wb"))
        return self._file

    def _file_name(self) -> str:
        return f"__0_{self._num_files - 1}.distcp"

    def _close_file(self) -> None:
        if self._file is not None:
            self._file_digests[self._file_name()] = self._file.digest()
            with os_errors(self._folder):
                self._file.close()
            self._file = None
