"""ckptool: convert, reshard and resume PyTorch distributed checkpoints.

Everything public is importable from here and loaded on first use, so that `import ckptool` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.core.data_source import DataSource as DataSource
    from ckptool.core.history import Fed as Fed
    from ckptool.core.position import DataPosition as DataPosition
    from ckptool.core.position import rank_units as rank_units
    from ckptool.core.position_edits import accept_data_change as accept_data_change
    from ckptool.core.provenance import Naming as Naming
    from ckptool.core.provenance import Provenance as Provenance
    from ckptool.distributed import load as load
    from ckptool.distributed import save as save
    from ckptool.distributed_async import AsyncSaver as AsyncSaver
    from ckptool.distributed_async import PendingSave as PendingSave
    from ckptool.distributed_async import async_save as async_save
    from ckptool.errors import CkptoolError as CkptoolError
    from ckptool.errors import DamagedError as DamagedError
    from ckptool.errors import MismatchError as MismatchError
    from ckptool.errors import NotFoundError as NotFoundError
    from ckptool.errors import TargetExistsError as TargetExistsError
    from ckptool.errors import UnsupportedError as UnsupportedError
    from ckptool.errors import UsageError as UsageError
    from ckptool.formats.dcp_metadata import read_manifest
    from ckptool.formats.dcp_reader import StorageReader as StorageReader
    from ckptool.formats.dcp_storage_writer import StorageWriter as StorageWriter
    from ckptool.naming.meta_model import read_config as read_config
    from ckptool.ops.diff import diff as diff
    from ckptool.ops.estimate import estimate as estimate
    from ckptool.ops.export import export as export
    from ckptool.ops.import_hf import import_hf as import_hf
    from ckptool.ops.prune import prune as prune
    from ckptool.ops.report import report as report
    from ckptool.ops.top import top as top
    from ckptool.ops.verify import verify as verify
    from ckptool.runs import find_latest as find_latest
    from ckptool.runs import list_checkpoints as list_checkpoints
    from ckptool.runs import resolve as resolve
    from ckptool.sampler import GlobalBatchSampler as GlobalBatchSampler
    from ckptool.storage.data_files import SourceFile as SourceFile
    from ckptool.storage.data_files import files_record as files_record
    from ckptool.storage.data_files import find_source_files as find_source_files

    open_checkpoint = read_manifest

__version__ = "0.1.0"

_HOMES = {
    "CkptoolError": "ckptool.errors",
    "DamagedError": "ckptool.errors",
    "MismatchError": "ckptool.errors",
    "NotFoundError": "ckptool.errors",
    "TargetExistsError": "ckptool.errors",
    "UnsupportedError": "ckptool.errors",
    "UsageError": "ckptool.errors",
    "DataPosition": "ckptool.core.position",
    "Fed": "ckptool.core.history",
    "GlobalBatchSampler": "ckptool.sampler",
    "SourceFile": "ckptool.storage.data_files",
    "files_record": "ckptool.storage.data_files",
    "find_source_files": "ckptool.storage.data_files",
    "accept_data_change": "ckptool.core.position_edits",
    "rank_units": "ckptool.core.position",
    "DataSource": "ckptool.core.data_source",
    "Naming": "ckptool.core.provenance",
    "Provenance": "ckptool.core.provenance",
    "open_checkpoint": "ckptool.formats.dcp_metadata:read_manifest",
    "StorageReader": "ckptool.formats.dcp_reader",
    "StorageWriter": "ckptool.formats.dcp_storage_writer",
    "import_hf": "ckptool.ops.import_hf",
    "export": "ckptool.ops.export",
    "prune": "ckptool.ops.prune",
    "report": "ckptool.ops.report",
    "top": "ckptool.ops.top",
    "verify": "ckptool.ops.verify",
    "diff": "ckptool.ops.diff",
    "estimate": "ckptool.ops.estimate",
    "find_latest": "ckptool.runs",
    "list_checkpoints": "ckptool.runs",
    "resolve": "ckptool.runs",
    "read_config": "ckptool.naming.meta_model",
    "save": "ckptool.distributed",
    "AsyncSaver": "ckptool.distributed_async",
    "PendingSave": "ckptool.distributed_async",
    "async_save": "ckptool.distributed_async",
    "load": "ckptool.distributed",
}

__all__ = [
    "AsyncSaver",
    "CkptoolError",
    "DamagedError",
    "DataPosition",
    "DataSource",
    "Fed",
    "GlobalBatchSampler",
    "MismatchError",
    "Naming",
    "NotFoundError",
    "PendingSave",
    "Provenance",
    "SourceFile",
    "StorageReader",
    "StorageWriter",
    "TargetExistsError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "accept_data_change",
    "async_save",
    "diff",
    "estimate",
    "export",
    "files_record",
    "find_latest",
    "find_source_files",
    "import_hf",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "prune",
    "rank_units",
    "read_config",
    "report",
    "resolve",
    "save",
    "top",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptool' has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
