"""ckptool: convert, reshard and resume PyTorch distributed checkpoints.

Everything public is importable from here and loaded on first use, so that `import ckptool` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.core.checkpoint import Manifest as Manifest
    from ckptool.core.data_source import DataSource as DataSource
    from ckptool.core.history import Fed as Fed
    from ckptool.core.mesh import Mesh as Mesh
    from ckptool.core.plan import Plan as Plan
    from ckptool.core.plan import Result as Result
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
    from ckptool.errors import AccessError as AccessError
    from ckptool.errors import CkptoolError as CkptoolError
    from ckptool.errors import DamagedError as DamagedError
    from ckptool.errors import DistributedError as DistributedError
    from ckptool.errors import LockedError as LockedError
    from ckptool.errors import MismatchError as MismatchError
    from ckptool.errors import NotFoundError as NotFoundError
    from ckptool.errors import StorageError as StorageError
    from ckptool.errors import TargetExistsError as TargetExistsError
    from ckptool.errors import UnsafeError as UnsafeError
    from ckptool.errors import UnsupportedError as UnsupportedError
    from ckptool.errors import UsageError as UsageError
    from ckptool.formats.dcp_metadata import read_manifest
    from ckptool.formats.dcp_metadata import read_provenance as read_provenance
    from ckptool.formats.dcp_reader import StorageReader as StorageReader
    from ckptool.formats.dcp_storage_writer import StorageWriter as StorageWriter
    from ckptool.formats.hf_folder import model_folder as model_folder
    from ckptool.formats.unit_layout import UnitLayout as UnitLayout
    from ckptool.naming.meta_model import read_config as read_config
    from ckptool.ops.copy import copy as copy
    from ckptool.ops.data_edit import edit as data_edit
    from ckptool.ops.data_edit import seek as data_seek
    from ckptool.ops.data_edit import skip as data_skip
    from ckptool.ops.data_import import import_position as data_import
    from ckptool.ops.data_show import diff_positions as data_diff
    from ckptool.ops.data_show import plan_step as data_plan
    from ckptool.ops.data_show import show_position as data_show
    from ckptool.ops.data_verify import verify_position as data_verify
    from ckptool.ops.diff import diff as diff
    from ckptool.ops.estimate import estimate as estimate
    from ckptool.ops.export import export as export
    from ckptool.ops.import_hf import import_hf as import_hf
    from ckptool.ops.inspect import inspect as inspect
    from ckptool.ops.pin import pin as pin
    from ckptool.ops.plan_reads import plan_reads as plan_reads
    from ckptool.ops.prune import prune as prune
    from ckptool.ops.push import PushTarget as PushTarget
    from ckptool.ops.push import push as push
    from ckptool.ops.report import report as report
    from ckptool.ops.reshard import reshard as reshard
    from ckptool.ops.top import top as top
    from ckptool.ops.verify import verify as verify
    from ckptool.runs import find_latest as find_latest
    from ckptool.runs import list_checkpoints as list_checkpoints
    from ckptool.runs import resolve as resolve
    from ckptool.sampler import GlobalBatchSampler as GlobalBatchSampler
    from ckptool.storage.data_files import SourceFile as SourceFile
    from ckptool.storage.data_files import files_record as files_record
    from ckptool.storage.data_files import find_source_files as find_source_files
    from ckptool.storage.digests_file import is_as_written as is_as_written
    from ckptool.storage.digests_file import weights_digest as weights_digest
    from ckptool.storage.files import Place as Place
    from ckptool.storage.place import place as place
    from ckptool.storage.root_lock import hold_root as hold_root

    open_checkpoint = read_manifest

__version__ = "0.1.0"

_HOMES = {
    "AccessError": "ckptool.errors",
    "AsyncSaver": "ckptool.distributed_async",
    "CkptoolError": "ckptool.errors",
    "DamagedError": "ckptool.errors",
    "DataPosition": "ckptool.core.position",
    "DataSource": "ckptool.core.data_source",
    "DistributedError": "ckptool.errors",
    "Fed": "ckptool.core.history",
    "GlobalBatchSampler": "ckptool.sampler",
    "LockedError": "ckptool.errors",
    "Manifest": "ckptool.core.checkpoint",
    "Mesh": "ckptool.core.mesh",
    "MismatchError": "ckptool.errors",
    "Naming": "ckptool.core.provenance",
    "NotFoundError": "ckptool.errors",
    "PendingSave": "ckptool.distributed_async",
    "Place": "ckptool.storage.files",
    "Plan": "ckptool.core.plan",
    "Provenance": "ckptool.core.provenance",
    "PushTarget": "ckptool.ops.push",
    "Result": "ckptool.core.plan",
    "SourceFile": "ckptool.storage.data_files",
    "StorageError": "ckptool.errors",
    "StorageReader": "ckptool.formats.dcp_reader",
    "StorageWriter": "ckptool.formats.dcp_storage_writer",
    "TargetExistsError": "ckptool.errors",
    "UnitLayout": "ckptool.formats.unit_layout",
    "UnsafeError": "ckptool.errors",
    "UnsupportedError": "ckptool.errors",
    "UsageError": "ckptool.errors",
    "accept_data_change": "ckptool.core.position_edits",
    "async_save": "ckptool.distributed_async",
    "copy": "ckptool.ops.copy",
    "data_diff": "ckptool.ops.data_show:diff_positions",
    "data_edit": "ckptool.ops.data_edit:edit",
    "data_import": "ckptool.ops.data_import:import_position",
    "data_plan": "ckptool.ops.data_show:plan_step",
    "data_seek": "ckptool.ops.data_edit:seek",
    "data_show": "ckptool.ops.data_show:show_position",
    "data_skip": "ckptool.ops.data_edit:skip",
    "data_verify": "ckptool.ops.data_verify:verify_position",
    "diff": "ckptool.ops.diff",
    "estimate": "ckptool.ops.estimate",
    "export": "ckptool.ops.export",
    "files_record": "ckptool.storage.data_files",
    "find_latest": "ckptool.runs",
    "find_source_files": "ckptool.storage.data_files",
    "hold_root": "ckptool.storage.root_lock",
    "import_hf": "ckptool.ops.import_hf",
    "inspect": "ckptool.ops.inspect",
    "is_as_written": "ckptool.storage.digests_file",
    "list_checkpoints": "ckptool.runs",
    "load": "ckptool.distributed",
    "model_folder": "ckptool.formats.hf_folder",
    "open_checkpoint": "ckptool.formats.dcp_metadata:read_manifest",
    "pin": "ckptool.ops.pin",
    "place": "ckptool.storage.place",
    "plan_reads": "ckptool.ops.plan_reads",
    "prune": "ckptool.ops.prune",
    "push": "ckptool.ops.push",
    "rank_units": "ckptool.core.position",
    "read_config": "ckptool.naming.meta_model",
    "read_provenance": "ckptool.formats.dcp_metadata",
    "report": "ckptool.ops.report",
    "reshard": "ckptool.ops.reshard",
    "resolve": "ckptool.runs",
    "save": "ckptool.distributed",
    "top": "ckptool.ops.top",
    "verify": "ckptool.ops.verify",
    "weights_digest": "ckptool.storage.digests_file",
}

__all__ = [
    "AccessError",
    "AsyncSaver",
    "CkptoolError",
    "DamagedError",
    "DataPosition",
    "DataSource",
    "DistributedError",
    "Fed",
    "GlobalBatchSampler",
    "LockedError",
    "Manifest",
    "Mesh",
    "MismatchError",
    "Naming",
    "NotFoundError",
    "PendingSave",
    "Place",
    "Plan",
    "Provenance",
    "PushTarget",
    "Result",
    "SourceFile",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "TargetExistsError",
    "UnitLayout",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "accept_data_change",
    "async_save",
    "copy",
    "data_diff",
    "data_edit",
    "data_import",
    "data_plan",
    "data_seek",
    "data_show",
    "data_skip",
    "data_verify",
    "diff",
    "estimate",
    "export",
    "files_record",
    "find_latest",
    "find_source_files",
    "hold_root",
    "import_hf",
    "inspect",
    "is_as_written",
    "list_checkpoints",
    "load",
    "model_folder",
    "open_checkpoint",
    "pin",
    "place",
    "plan_reads",
    "prune",
    "push",
    "rank_units",
    "read_config",
    "read_provenance",
    "report",
    "reshard",
    "resolve",
    "save",
    "top",
    "verify",
    "weights_digest",
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
