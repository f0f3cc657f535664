"""torch DCP's plug points - writer, reader, planners - as `ckptool.distributed` needs them.

Every error inside them becomes a plain RuntimeError or CkptoolError: DCP sends errors to the other ranks by pickle, and
one that can't be pickled would leave those waiting for ever.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptool.core.box import Box
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_source import DcpSource, load_blob
from ckptool.formats.dcp_torch import add_aliases, stamp_version, to_torch_metadata, write_metadata
from ckptool.storage.files import explain_os_error


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
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


class SaveWriter(FileSystemWriter):
    """Writes what DCP's FileSystemWriter writes, with two differences in `.metadata`: the aliases of `ties` (alias fqn
    -> canonical fqn) are listed, and the writer's own path is not."""

    def __init__(self, folder: Path, ties: Mapping[str, str]) -> None:
        super().__init__(folder, overwrite=False)
        self._folder = folder
        self._ties = dict(ties)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with plain_errors(self._folder):
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with plain_errors(self._folder):
            return super().write_data(plan, planner)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with plain_errors(self._folder):
            stamp_version(metadata)
            metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
            metadata.storage_meta = self.storage_meta()
            add_aliases(metadata, self._ties)
            write_metadata(self._folder, metadata)


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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = to_torch_metadata(self._source.manifest)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with plain_errors(Path(self._source.manifest.location)):
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._source.read_object(item.storage_index.fqn)))
                else:
                    self._read_tensor(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        fqn, chunk_offsets = item.storage_index.fqn, item.storage_index.offset or ()
        offsets = tuple(a + b for a, b in zip(chunk_offsets, item.storage_offsets, strict=True))
        box = Box(offsets, tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if box.num_elements:
            stored = torch.empty(box.sizes, dtype=getattr(torch, self._source.manifest.tensors[fqn].dtype))
            self._source.read_into(fqn, box, memoryview(stored.reshape(-1).view(torch.uint8).numpy().data))
            target.copy_(stored)
        planner.commit_tensor(item, target)


class LoadStatePlanner(DefaultLoadPlanner):
    """DCP's own planner, loading non-tensor values as plain data only. Names are checked before it is asked."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], load_blob(value.getvalue(), fqn))
