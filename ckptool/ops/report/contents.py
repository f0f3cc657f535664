"""What a report shows, gathered: the run, the checkpoint's shards, sizes and values, the change, what verify finds."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import Progress, Source
from ckptool.errors import DamagedError, NotFoundError, UsageError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.hf_folder import HfSource
from ckptool.ops.diff import Difference, diff
from ckptool.ops.report.shards import ShardMap, map_shards
from ckptool.ops.report.sizes import ModuleSize, module_sizes
from ckptool.ops.report.statistics import ValueStatistics, has_statistics, tensor_statistics
from ckptool.ops.report.steps import Steps
from ckptool.ops.report.subject import Subject, find_subject
from ckptool.ops.verify import Verification, verify
from ckptool.runs import CheckpointSummary, list_checkpoints
from ckptool.storage.files import Place
from ckptool.storage.metrics_file import METRICS_FILE, read_records
from ckptool.storage.store import shown_name


@dataclass
class Contents:
    """The parts of a report; None or empty for what there is not, and `notes` says why."""

    subject: Subject
    steps: Steps | None = None
    checkpoints: list[CheckpointSummary] = field(default_factory=list)
    manifest: Manifest | None = None
    shards: ShardMap | None = None
    modules: tuple[ModuleSize, ...] = ()
    tensors: list[ValueStatistics] | None = None
    difference: Difference | None = None
    verification: Verification | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """The options of `report` that say what to look at."""

    against: str | None = None
    root: Place | None = None
    work_dir: Place | None = None
    keys: str = "*"
    level: str = "structure"
    values: bool = True
    progress: Callable[[int], Progress] | None = None


def gather(name: str, wanted: Wanted) -> Contents:
    """Read all that a report on `name` shows. Damage is part of the report: what can't be read is named in `notes`.

    Raises NotFoundError, UsageError, UnsafeError, UnsupportedError.
    """
    subject = find_subject(name, wanted.root, wanted.work_dir)
    if wanted.against is not None and subject.checkpoint is None:
        raise UsageError(f"--against: {shown_name(name)} has no complete checkpoint to compare")
    contents = Contents(subject)
    if subject.run is not None:
        _gather_run(contents, subject.run, wanted.work_dir)
    if subject.checkpoint is None:
        contents.notes.append(f"{subject.run} has no complete checkpoint yet")
    else:
        _gather_checkpoint(contents, subject.checkpoint, wanted)
    return contents


def _gather_run(contents: Contents, root: Place, work_dir: Place | None) -> None:
    contents.checkpoints = list_checkpoints(root)
    file = (work_dir or root) / METRICS_FILE
    if not file.is_file():
        contents.notes.append(f"{file.parent} has no {METRICS_FILE}: there is no timeline")
        return
    try:
        contents.steps = Steps().add(read_records(file))
    except DamagedError as error:
        contents.notes.append(f"no timeline: {error}")


def _gather_checkpoint(contents: Contents, path: Place, wanted: Wanted) -> None:
    contents.verification = verify(path, level=wanted.level, progress=wanted.progress)
    contents.notes += contents.verification.notes
    try:
        contents.manifest = _manifest(contents.subject, path)
    except DamagedError as error:
        contents.notes.append(f"nothing more can be said about the checkpoint: {error}")
        return
    if not any(fnmatch.fnmatchcase(fqn, wanted.keys) for fqn in contents.manifest.tensors):
        raise NotFoundError(f"no tensor matches {wanted.keys!r}", hint="ckptool inspect shows the names")
    contents.shards = map_shards(contents.manifest, wanted.keys)
    contents.modules = module_sizes(contents.manifest)
    if not wanted.values:
        return
    try:
        contents.tensors = _statistics(contents.subject, contents.manifest, path, wanted)
    except DamagedError as error:
        contents.notes.append(f"the values can't be read: {error}")
        return
    if wanted.against is not None:
        contents.difference = diff(path, wanted.against, root=wanted.root, keys=wanted.keys, progress=wanted.progress)
        contents.notes += contents.difference.notes


def _manifest(subject: Subject, path: Place) -> Manifest:
    return HfSource(path).manifest if subject.is_hf else read_manifest(path)


def _statistics(subject: Subject, manifest: Manifest, path: Place, wanted: Wanted) -> list[ValueStatistics]:
    fqns = [
        fqn
        for fqn, entry in manifest.tensors.items()
        if fqn not in manifest.ties and has_statistics(entry.dtype) and fnmatch.fnmatchcase(fqn, wanted.keys)
    ]

    def open_source() -> Source:
        return HfSource(path) if subject.is_hf else DcpSource(path)

    report = wanted.progress(sum(manifest.tensors[fqn].num_bytes for fqn in fqns)) if wanted.progress else None
    return tensor_statistics(open_source, fqns, report)
