"""torch DCP's plug points - writer, reader, planners - as `ckptool.distributed` needs them.

Every error inside them becomes a plain RuntimeError or CkptoolError: DCP sends errors to the other ranks by pickle, and
one that can't be pickled would leave those waiting for ever.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import os
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as ParallelResult
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.futures import Future

from ckptool.core.box import Box
from ckptool.core.tensors import Chunk
from ckptool.formats.dcp_reader import SourceReader, plain_errors
from ckptool.formats.dcp_source import DcpSource, element_view, load_blob, slices
from ckptool.formats.dcp_torch import commit, stamp_version
from ckptool.formats.tensor_digest import digest_tensor
from ckptool.storage.digest import TensorDigest, digest_box
from ckptool.storage.digests_file import FileDigest
from ckptool.storage.hashing import HashingFile

_PIECE_BYTES = 16 << 20


def _reduce_frame(frame: traceback.FrameSummary) -> tuple[Any, ...]:
    return traceback.FrameSummary, (frame.filename, frame.lineno, frame.name)


# DCP pickles an error together with its stack. From Python 3.13 on a stack's frames hold code objects, which can't be
# pickled; torch before 2.13 sends them all the same, and the other ranks then wait for ever.
copyreg.pickle(traceback.FrameSummary, _reduce_frame)


@dataclasses.dataclass
class _RankDigests:
    """What a rank has written: the digests of its files, and the sums over its chunks of each tensor."""

    files: dict[str, FileDigest]
    tensors: dict[str, TensorDigest]


class _HashingFileSystem(FileSystem):
    """Local files that are hashed while they are written."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with contextlib.closing(HashingFile(Path(path))) as stream:
            yield stream
        self.digests[Path(path).name] = stream.digest()


class _DigestingPlanner:
    """What the writer asks a planner for, digested on the way: only the items of this rank's final plan.

    Tensors in the CPU's memory are digested by a thread, beside the one that writes; those on a GPU are, there.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._thread = ThreadPoolExecutor(1, "digest")
        self._parts: list[tuple[str, ParallelResult[TensorDigest]]] = []

    def resolve_data(self, item: WriteItem) -> Any:
        data = self._planner.resolve_data(item)
        if item.tensor_data is not None and isinstance(data, torch.Tensor):
            chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if data.is_cpu:
                part = self._thread.submit(digest_tensor, data, box, shape)
            else:
                part = ParallelResult()
                part.set_result(digest_tensor(data, box, shape))
            self._parts.append((item.index.fqn, part))
        return data

    def finish(self) -> dict[str, TensorDigest]:
        """The sums of everything that was asked for, by fqn."""
        digests: dict[str, TensorDigest] = {}
        for fqn, part in self._parts:
            digests[fqn] = digests.get(fqn, TensorDigest()) + part.result()
        return digests

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class SaveWriter(FileSystemWriter):
    """Writes the `.distcp` files that DCP's FileSystemWriter writes, digested on the way by the rank that writes them.

    Rank 0 finishes the folder with `digests.json` and `.metadata`, in which the aliases of `ties` (alias fqn ->
    canonical fqn) are listed, and the writer's own path is not. The folder and its sidecars must be there before.
    """

    def __init__(self, folder: Path, ties: Mapping[str, str]) -> None:
        super().__init__(folder, overwrite=False)
        self._ties = dict(ties)
        self._write_into(folder)

    def _write_into(self, folder: Path) -> None:
        """Nothing is written yet; from here on, into `folder`."""
        self._hashed = _HashingFileSystem()
        self.fs = self._hashed
        self.path = self.fs.init_path(folder)
        self._folder = folder

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Not as in the base class, which makes the folder: a rank that comes late must not bring back one that is gone.
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """The rank's write results, and one `_RankDigests` after them: DCP takes the list to rank 0 as it is."""
        with plain_errors(self._folder), contextlib.closing(_DigestingPlanner(planner)) as digesting:
            written = super().write_data(plan, cast(SavePlanner, digesting)).wait()
            digests = _RankDigests(self._hashed.digests, digesting.finish())
        done: Future[list[Any]] = Future()
        done.set_result([*written, digests])
        return done

    def written(self) -> dict[str, str]:
        """The files that this rank has written, with their BLAKE3."""
        return {name: digest.blake3 for name, digest in self._hashed.digests.items()}

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        with plain_errors(self._folder):
            stamp_version(metadata)
            metadata.storage_data = {}
            files: dict[str, FileDigest] = {}
            tensors: dict[str, TensorDigest] = {}
            for *written, digests in results:
                metadata.storage_data.update({result.index: result.storage_data for result in written})
                files.update(digests.files)
                for fqn, digest in digests.tensors.items():
                    tensors[fqn] = tensors.get(fqn, TensorDigest()) + digest
            commit(self._folder, metadata, self._ties, files, tensors)


class SaveStatePlanner(DefaultSavePlanner):
    """DCP's own planner, with errors that can travel."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        with plain_errors(Path()):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)


class LoadReader(SourceReader):
    """Adds up the digest of what it reads, beside the reading, for a comparison over all ranks.

    `uneven` tensors, which the ranks together don't read equally often in every element, can't be compared; of those
    whole chunks are read, and their CRC checked.
    """

    def __init__(self, source: DcpSource) -> None:
        super().__init__(source, allow_cast=True)
        self.uneven: frozenset[str] = frozenset()
        self._has_digests = not source.check_crc
        self._parts: list[tuple[str, int, TensorDigest]] = []

    def _is_read_alone(self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor) -> bool:
        return fqn in self.uneven or super()._is_read_alone(fqn, chunk, box, target)

    def _fill(self, fqn: str, chunk: Chunk, box: Box, data: memoryview) -> None:
        if fqn in self.uneven:
            self._fill_checked(fqn, chunk, box, data)
            return
        super()._fill(fqn, chunk, box, data)
        if self._has_digests:
            entry = self._source.manifest.tensors[fqn]
            digest = digest_box(data, box, entry.shape, entry.itemsize_bytes)
            self._parts.append((self._source.manifest.ties.get(fqn, fqn), box.num_elements, digest))

    def _fill_checked(self, fqn: str, chunk: Chunk, box: Box, data: memoryview) -> None:
        """Read the whole chunk, a few rows at a time, which lets the source compare its CRC; keep what is asked for."""
        entry = self._source.manifest.tensors[fqn]
        row_bytes = chunk.box.num_elements * entry.itemsize_bytes // (chunk.box.sizes[0] if chunk.box.sizes else 1)
        wanted = element_view(data, box.sizes, entry.itemsize_bytes)
        self._source.check_crc = True
        for rows in chunk.box.split_rows(max(1, _PIECE_BYTES // row_bytes)):
            buffer = memoryview(bytearray(rows.num_elements * entry.itemsize_bytes))
            self._source.read_chunk_into(fqn, chunk, rows, buffer)
            common = rows.intersect(box)
            if common is not None:
                stored = element_view(buffer, rows.sizes, entry.itemsize_bytes)
                wanted[slices(common.local_to(box))].copy_(stored[slices(common.local_to(rows))])
        self._source.check_crc = False

    def digests(self) -> dict[str, tuple[TensorDigest, int]]:
        """Per canonical fqn, the digest of what was read, and how many elements that is."""
        read: dict[str, tuple[TensorDigest, int]] = {}
        for fqn, num_elements, part in self._parts:
            digest, num_before = read.get(fqn, (TensorDigest(), 0))
            read[fqn] = (digest + part, num_before + num_elements)
        return read


def box_of(item: ReadItem) -> Box:
    """What is read, as a part of the whole tensor."""
    offsets = zip(item.storage_index.offset or (), item.storage_offsets, strict=True)
    return Box(tuple(a + b for a, b in offsets), tuple(item.lengths))


class LoadStatePlanner(DefaultLoadPlanner):
    """DCP's own planner, loading non-tensor values as plain data only. Names are checked before it is asked."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)
        self._plan: LoadPlan | None = None

    def reads(self, state_dict: dict[str, Any], metadata: Metadata) -> list[tuple[str, Box]]:
        """What this rank will read of tensors, each a region of one stored chunk."""
        self.set_up_planner(state_dict, metadata, is_coordinator=False)
        items = [item for item in self.create_local_plan().items if item.type == LoadItemType.TENSOR]
        return [(item.storage_index.fqn, box_of(item)) for item in items]

    def create_local_plan(self) -> LoadPlan:
        """Made once: torch goes through all stored chunks for it, of which there may be a million."""
        if self._plan is None:
            self._plan = super().create_local_plan()
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], load_blob(value.getvalue(), fqn))
