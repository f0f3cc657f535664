"""A reader for `torch.distributed.checkpoint.load` that trusts nothing and copies little.

torch's own FileSystemReader loads every stored chunk that it touches whole, copies the part that it needs, and
unpickles what it is given. This one reads the bytes that are needed, into the tensor that wants them.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckptool.core.box import Box
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import Chunk
from ckptool.errors import CkptoolError, DamagedError, MismatchError
from ckptool.formats import tensor_reads
from ckptool.formats.dcp_source import DcpSource, load_blob
from ckptool.formats.dcp_torch import stored_chunks, to_torch_metadata
from ckptool.formats.tensor_reads import TensorReads
from ckptool.storage.fetch_ahead import FetchAhead
from ckptool.storage.files import explain_os_error
from ckptool.storage.place import place
from ckptool.storage.store_path import StorePath

#: Files that a thread keeps open. Reads come in their order, and threads may be several.
_MAX_OPEN = 8


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


class SourceReader(TorchStorageReader):
    """Reads from an open checkpoint. Of a chunk only the bytes that are asked for, in the order of the file."""

    def __init__(self, source: DcpSource, allow_cast: bool = False) -> None:
        super().__init__()
        self._source = source
        self._allow_cast = allow_cast
        self._metadata: Metadata | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._source.manifest.location

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Go on with another checkpoint. Raises as `StorageReader` does."""
        if checkpoint_id is not None and Path(checkpoint_id) != Path(self.checkpoint_id):
            self._source.close()
            self._source, self._metadata = _open(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = to_torch_metadata(self._source.manifest)
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return place(os.fspath(checkpoint_id)).is_dir()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with plain_errors(Path(self.checkpoint_id)):
            reads = [(item, self._chunk_of(item)) for item in plan.items if item.type != LoadItemType.BYTE_IO]
            reads.sort(key=_place)
            self._source.reader.max_open = _MAX_OPEN
            with FetchAhead(self._ranges(i, c) for i, c in reads) as ahead, TensorReads(self._fill) as tensors:
                for item, chunk in reads:
                    self._read_tensor(item, chunk, planner, tensors, ahead)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    blob = self._source.read_object(item.storage_index.fqn)
                    # torch's planner unpickles it without restrictions.
                    load_blob(blob, f"{self.checkpoint_id}: {item.storage_index.fqn}")
                    planner.load_bytes(item, io.BytesIO(blob))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk_of(self, item: ReadItem) -> Chunk:
        """The stored chunk that a read is from, found by its number in the metadata that the planner was given."""
        fqn, offsets, number = item.storage_index.fqn, tuple(item.storage_index.offset or ()), item.storage_index.index
        chunks = stored_chunks(self._source.manifest.tensors[fqn])
        if number is not None and number < len(chunks) and chunks[number].box.offsets == offsets:
            return chunks[number]
        for chunk in chunks:
            if chunk.box.offsets == offsets:
                return chunk
        raise DamagedError(f"{self.checkpoint_id}: {fqn} has no chunk at {list(offsets)}")

    def _ranges(self, item: ReadItem, chunk: Chunk) -> Iterator[StoreRange]:
        return self._source.chunk_ranges(item.storage_index.fqn, chunk, _box(item, chunk))

    def _read_tensor(
        self, item: ReadItem, chunk: Chunk, planner: LoadPlanner, tensors: TensorReads, ahead: FetchAhead
    ) -> None:
        fqn, box = item.storage_index.fqn, _box(item, chunk)
        target = planner.resolve_tensor(item).detach()
        dtype = getattr(torch, self._source.manifest.tensors[fqn].dtype)
        if tuple(target.shape) != box.sizes:
            raise MismatchError(f"{fqn}: a read of {list(box.sizes)} elements into a tensor of {list(target.shape)}")
        if target.dtype != dtype and not self._allow_cast:
            raise MismatchError(
                f"{fqn} is {dtype} in the checkpoint, {target.dtype} here",
                hint="StorageReader(path, allow_cast=True) loads it into another dtype",
            )

        def done() -> None:
            planner.commit_tensor(item, target)
            ahead.passed()

        if box.num_elements and self._is_read_alone(fqn, chunk, box, target):
            tensors.read_alone(fqn, chunk, box, target, dtype, done)
        else:
            tensors.add(fqn, chunk, box, target, dtype, done)

    def _is_read_alone(self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor) -> bool:
        """True for what is read as a whole and while nothing else is.

        From a store, which is asked for much at a time and ahead; a large chunk with another order of dims in the file,
        all of which must be in memory; and a tensor of a class of its own, whose parts may be no places to write to.
        """
        is_stored_elsewhere = isinstance(self._source.reader.root, StorePath)
        is_large = box.num_elements * self._source.manifest.tensors[fqn].itemsize_bytes > tensor_reads.PIECE_BYTES
        is_plain = type(target) is torch.Tensor
        return is_stored_elsewhere or not is_plain or (is_large and self._source.is_turned(fqn, chunk))

    def _fill(self, fqn: str, chunk: Chunk, box: Box, data: memoryview) -> None:
        """Read the part `box` of a tensor, which lies in `chunk`, into `data`."""
        self._source.read_chunk_into(fqn, chunk, box, data)


class StorageReader(SourceReader):
    """Reads a checkpoint of any writer, a folder or URL, for `torch.distributed.checkpoint.load`:

        dcp.load(state_dict, storage_reader=ckptool.StorageReader(path))

    `.metadata` is read through an allow-list, objects only when they are plain data, and a tensor that the chunks don't
    cover exactly once is refused. A tensor of another dtype is refused unless `allow_cast`. What the bytes are is not
    checked: `ckptool.load` does that too.

    Raises NotFoundError, DamagedError or UnsafeError for a checkpoint that can't be read. What `dcp.load` meets later
    comes in its CheckpointException.
    """

    def __init__(self, path: str | os.PathLike, *, allow_cast: bool = False) -> None:
        super().__init__(_open(path), allow_cast)


def _open(path: str | os.PathLike) -> DcpSource:
    source = DcpSource(place(os.fspath(path)))
    source.check_crc = False
    return source


def _box(item: ReadItem, chunk: Chunk) -> Box:
    """What is read, as a part of the whole tensor."""
    offsets = tuple(a + b for a, b in zip(chunk.box.offsets, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


def _place(read: tuple[ReadItem, Chunk]) -> tuple[str, int, tuple[int, ...]]:
    """Where a read begins: by file, chunk and place in the chunk."""
    item, chunk = read
    file, offset = (chunk.locator.file, chunk.locator.offset) if chunk.locator else ("", 0)
    return file, offset, tuple(item.storage_offsets)
