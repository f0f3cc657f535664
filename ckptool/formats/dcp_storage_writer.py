"""A writer for torch's `dcp.save` and `dcp.async_save`, in the public door."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from ckptool.core.provenance import Provenance
from ckptool.errors import UnsupportedError
from ckptool.formats.dcp_adapters import SaveWriter
from ckptool.formats.dcp_metadata import PROVENANCE_FILE
from ckptool.formats.dcp_reader import plain_errors
from ckptool.storage.files import os_errors, write_json
from ckptool.storage.staging import Staging, create_staging
from ckptool.storage.store import is_url, shown_name


@dataclass(frozen=True)
class _Place:
    """What the first rank tells each: the folder to write into, and how its files' names begin."""

    prefix: str
    folder: Path


class StorageWriter(SaveWriter):
    """Publishes what `torch.distributed.checkpoint.save` saves as a whole checkpoint of ckptool's, or not at all:

        dcp.save(state_dict, storage_writer=ckptool.StorageWriter(path))

    Files are written into a hidden folder beside `path`, with digests of files and tensors, and get their name when all
    ranks are done; a save that fails or is killed leaves `path` as it was. `ties` and `overwrite` are those of
    `ckptool.save`. With `dcp.async_save` torch's own copy of the state is written; `ckptool.async_save` keeps the
    training for less long.

    What goes wrong comes in `dcp.save`'s CheckpointException: TargetExistsError, LockedError, StorageError,
    MismatchError.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        ties: Mapping[str, str] | None = None,
        provenance: Provenance | None = None,
        overwrite: bool = False,
    ) -> None:
        self._target = _local(path)
        super().__init__(self._target, ties or {})
        self._provenance = provenance
        self._replaces = overwrite
        self._staging: Staging | None = None
        self._discard: weakref.finalize | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Begin a save, of another checkpoint if one is named. What is left of one that failed is removed."""
        self._drop()
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._target = _local(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        if not options.get("use_collectives", True):
            raise UnsupportedError("a save without collectives can't be published as a whole", "use_collectives=True")
        super().set_up_storage_writer(is_coordinator, *args, **options)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: make the hidden folder."""
        with plain_errors(self._target):
            self._staging = create_staging(self._target, self._replaces)
            self._discard = weakref.finalize(self, self._staging.discard)
            folder = self._staging.content
            with os_errors(folder):
                folder.mkdir()
            provenance = self._provenance or bare_provenance(len(plans))
            write_json(folder / PROVENANCE_FILE, provenance.to_json())
        return [replace(plan, storage_data=_Place(f"__{rank}_", folder)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        self._write_into(plan.storage_data.folder)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        with plain_errors(self._target):
            if self._staging is not None:
                self._staging.publish()
        if self._discard is not None:
            self._discard.detach()
        self._staging = self._discard = None

    def _drop(self) -> None:
        if self._discard is not None:
            self._discard()
        self._staging = self._discard = None


def _local(path: str | os.PathLike) -> Path:
    if is_url(os.fspath(path)):
        raise UnsupportedError(
            f"{shown_name(os.fspath(path))}: StorageWriter writes to folders only",
            hint="ckptool.save and ckptool.async_save take URLs",
        )
    return Path(path)


def bare_provenance(world_size: int) -> Provenance:
    """What is known of a save that nothing was said about."""
    from ckptool import __version__

    return Provenance(tool_version=__version__, world_size=world_size)
