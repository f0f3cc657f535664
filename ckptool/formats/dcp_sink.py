"""Writing a DCP checkpoint from one process: every box becomes a stored chunk, a `torch.save` archive of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
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

#: Files open at once. A rank whose file had to be closed for others goes on in its next one.
MAX_OPEN_FILES = 256


def first_rank(fqn: str, box: Box) -> int:
    """Everything in the files of rank 0, as one process writes it."""
    return 0


class DcpSink:
    """A Sink that appends to `__{rank}_{i}.distcp` files of about `max_file_bytes`.

    `finish` writes `digests.json` and, last, `.metadata`: whatever else belongs into the folder must be there before.
    `tensors` are the tensors to come (their chunks, if any, are not looked at: the boxes written become the chunks),
    `paths` the keys of each fqn in the nested state dict (DCP's planner data), `ties` alias fqn -> canonical fqn.
    `rank_of(fqn, box)` chooses the rank in whose file a box is stored.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorEntry],
        paths: Mapping[str, tuple[str | int, ...]],
        ties: Mapping[str, str],
        max_file_bytes: int = 2 << 30,
        rank_of: Callable[[str, Box], int] = first_rank,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._paths = paths
        self._ties = ties
        self._max_file_bytes = max_file_bytes
        self._chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in tensors}
        self._objects: dict[str, ObjectEntry] = {}
        self._rank_of = rank_of
        self._num_files: dict[int, int] = {}
        #: By rank; the one written to last comes last.
        self._open: OrderedDict[int, tuple[str, HashingFile]] = OrderedDict()
        self._file_digests: dict[str, FileDigest] = {}
        self._digests = {fqn: TensorDigest() for fqn in tensors}

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Store a box's elements, given in C order. Raises StorageError when the disk refuses."""
        entry = self._tensors[fqn]
        with os_errors(self._folder):
            name, file = self._open_file(self._rank_of(fqn, box))
            start = file.tell()
            write_archive(file, data, entry.dtype, box.sizes)
            locator = Locator(name, start, file.tell() - start)
        self._chunks[fqn].append(Chunk(box, locator))
        self._digests[fqn] += digest_box(data, box, entry.shape, entry.itemsize_bytes)

    def write_object(self, fqn: str, data: bytes, rank: int = 0) -> None:
        """Store a `torch.save` blob as it is, in the file of `rank`."""
        with os_errors(self._folder):
            name, file = self._open_file(rank)
            locator = Locator(name, file.tell(), len(data))
            file.write(data)
        self._objects[fqn] = ObjectEntry(fqn, locator)

    def finish(self) -> None:
        """Write `digests.json` and `.metadata`. Raises MismatchError when the boxes don't make whole tensors."""
        for rank in list(self._open):
            self._close_file(rank)
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

    def _open_file(self, rank: int) -> tuple[str, HashingFile]:
        """The name of the file that `rank` is at, and that file."""
        if rank in self._open and self._open[rank][1].tell() >= self._max_file_bytes:
            self._close_file(rank)
        if rank not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._close_file(next(iter(self._open)))
            number = self._num_files.get(rank, 0)
            self._num_files[rank] = number + 1
            name = f"__{rank}_{number}.distcp"
            self._open[rank] = name, HashingFile((self._folder / name).open("wb"))
        self._open.move_to_end(rank)
        return self._open[rank]

    def _close_file(self, rank: int) -> None:
        name, file = self._open.pop(rank)
        self._file_digests[name] = file.digest()
        with os_errors(self._folder):
            file.close()
