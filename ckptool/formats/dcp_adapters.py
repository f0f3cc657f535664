"""torch DCP's plug points - writer, reader, planners - as `ckptool.distributed` needs them.

Every error inside them becomes a plain RuntimeError or CkptoolError: DCP sends errors to the other ranks by pickle, and
one that can't be pickled would leave those waiting for ever.
"""

from __future__ import annotations

import concurrent.futures
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
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.futures import Future

from ckptool.core.box import Box
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_source import DcpSource, load_blob
from ckptool.formats.dcp_torch import commit, stamp_version, to_torch_metadata
from ckptool.formats.tensor_digest import digest_tensor
from ckptool.storage.digest import TensorDigest, digest_box
from ckptool.storage.digests_file import FileDigest
from ckptool.storage.files import explain_os_error
from ckptool.storage.hashing import HashingFile


def _reduce_frame(frame: traceback.FrameSummary) -> tuple[Any, ...]:
    return traceback.FrameSummary, (frame.filename, frame.lineno, frame.name)


# DCP pickles an error together with its stack. From Python 3.13 on a stack's frames hold code objects, which can't be
# pickled; torch before 2.13 sends them all the same, and the other ranks then wait for ever.
copyreg.pickle(traceback.FrameSummary, _reduce_frame)


@contextlib.contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Let only errors out that survive being pickled to another rank."""
    try:
        yield
    except CkptoolError:
        raise
    except OSError as error:
        raise explain_os_error(error, error.filename or path) from None
    except Exception as error:
        refused = _os_error_behind(error)
        if refused is not None:
            raise explain_os_error(refused, refused.filename or path) from None
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _os_error_behind(error: BaseException) -> OSError | None:
    """The disk's own complaint: torch.save puts one about its half-written archive over it."""
    behind = error.__context__
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__context__
    return behind


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
        with contextlib.closing(HashingFile(cast(BinaryIO, Path(path).open(mode)))) as stream:
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
        self._hashed = _HashingFileSystem()
        self.fs = self._hashed
        self._folder = folder
        self._ties = dict(ties)

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


class LoadReader(FileSystemReader):
    """Reads through DcpSource: metadata by the allow-list, and of the chunks only what a rank needs."""

    def __init__(self, source: DcpSource) -> None:
        super().__init__(source.manifest.location)
        self._source = source
        #: Per canonical fqn, the digest of what was read, and how many elements that is.
        self.read: dict[str, tuple[TensorDigest, int]] = {}
        self._adding: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._adding.set_result(None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = to_torch_metadata(self._source.manifest)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        location = Path(self._source.manifest.location)
        with plain_errors(location), concurrent.futures.ThreadPoolExecutor(1, "digest") as adder:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._source.read_object(item.storage_index.fqn)))
                else:
                    self._read_tensor(item, planner, adder)
            self._adding.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner, adder: concurrent.futures.Executor) -> None:
        fqn, chunk_offsets = item.storage_index.fqn, item.storage_index.offset or ()
        offsets = tuple(a + b for a, b in zip(chunk_offsets, item.storage_offsets, strict=True))
        box = Box(offsets, tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if box.num_elements:
            stored = torch.empty(box.sizes, dtype=getattr(torch, self._source.manifest.tensors[fqn].dtype))
            data = memoryview(stored.reshape(-1).view(torch.uint8).numpy().data)
            self._source.read_into(fqn, box, data)
            # One at a time, beside the reading: two boxes in memory at most.
            self._adding.result()
            self._adding = adder.submit(self._add_up, fqn, box, data)
            target.copy_(stored)
        planner.commit_tensor(item, target)

    def _add_up(self, fqn: str, box: Box, data: memoryview) -> None:
        entry = self._source.manifest.tensors[fqn]
        canonical = self._source.manifest.ties.get(fqn, fqn)
        digest, num_elements = self.read.get(canonical, (TensorDigest(), 0))
        digest += digest_box(data, box, entry.shape, entry.itemsize_bytes)
        self.read[canonical] = (digest, num_elements + box.num_elements)


class LoadStatePlanner(DefaultLoadPlanner):
    """DCP's own planner, loading non-tensor values as plain data only. Names are checked before it is asked."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], load_blob(value.getvalue(), fqn))
