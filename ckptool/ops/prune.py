"""Remove the checkpoints of a run that no rule keeps: first a plan, then the removal.

Each is renamed to a hidden name before a byte of it goes, so half of one is never taken for a whole one, and the next
prune finishes what a killed one has begun. A store has no rename: there the marker of completeness goes first, and a
file that says so comes in its place.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptool import runs
from ckptool.core.plan import Result
from ckptool.core.retention import Candidate, KeepBest, KeepRules, reasons_to_keep
from ckptool.errors import CkptoolError, DamagedError, NotFoundError, StorageError, UsageError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.ops.ls import check_root
from ckptool.storage.files import Place, explain_os_error, fsync_path, os_errors
from ckptool.storage.lock import acquire, is_stale, owner_of
from ckptool.storage.metrics_file import find_metrics, read_metric
from ckptool.storage.pins import read_pins
from ckptool.storage.staging import is_staging, recover, target_of
from ckptool.storage.store_path import StorePath
from ckptool.storage.upload import MARKERS

#: An unfinished upload to which nothing has come for so long counts as given up: sending a file takes less.
UPLOAD_SILENCE_SECONDS = 6 * 3600.0

#: The end of the name of a folder that is being removed; in a store, a file in it.
_REMOVED_MARK = ".removed"
_CUT_SHORT = "its removal was cut short"


@dataclass(frozen=True)
class Entry:
    """A folder of the run root, and why it stays or goes. `num_bytes` is what it takes on the disk."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class PrunePlan:
    """What will stay, what will be removed, and what is broken but was not asked to be removed."""

    root: Place
    keep: tuple[Entry, ...]
    remove: tuple[Entry, ...]
    broken: tuple[Entry, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.remove)

    def to_json(self) -> dict[str, Any]:
        parts = {part: [asdict(entry) for entry in getattr(self, part)] for part in ("keep", "remove", "broken")}
        return {**parts, "freed_bytes": self.freed_bytes}


def prune(
    root: Place | None = None,
    *,
    keep_last: int = 0,
    keep_every: int = 0,
    keep_within_seconds: float = 0.0,
    keep_best: tuple[str, str, int] | None = None,
    work_dir: Place | None = None,
    stale: bool = False,
    dead_saves: bool = False,
    in_use: Collection[str] = (),
    confirm: Callable[[PrunePlan], bool] = lambda plan: True,
) -> Result:
    """Remove the complete `step-N` checkpoints under `root` that no rule keeps; the newest complete one always stays.

    `keep_best` is (metric, "min" or "max", count), by the run's metrics.jsonl in `root` or `work_dir`. `stale` also
    removes incomplete checkpoints and what dead writers left; without it they are only reported. `dead_saves` removes
    what killed writers of a `step-N` had not published. `in_use` are names that stay. `confirm` sees the plan and says
    whether to go on. A removal that fails is reported in the result, and the rest goes on.

    Raises UsageError without anything to do, and what reading the root raises; nothing is then removed.
    """
    start = time.monotonic()
    rules = KeepRules(keep_last, keep_every, keep_within_seconds, _best_rule(keep_best))
    if not rules and not stale:
        raise UsageError(
            "nothing says what to keep", hint="--keep-last 3, --keep-every 1000, --keep-within 7d; or only --stale"
        )
    root = runs.default_root() if root is None else root
    plan = plan_prune(root, rules, work_dir=work_dir, stale=stale, dead_saves=dead_saves, in_use=in_use)
    executed = confirm(plan)
    removed, failed = _execute(plan) if executed else ([], {})
    details = {**plan.to_json(), "removed": removed, "failed": failed}
    return Result("prune", str(plan.root), None, executed, time.monotonic() - start, details=details)


def plan_prune(
    root: Place,
    rules: KeepRules,
    *,
    work_dir: Place | None = None,
    stale: bool = False,
    dead_saves: bool = False,
    in_use: Collection[str] = (),
) -> PrunePlan:
    """Decide, without changing anything. Raises NotFoundError when `root` is not there or a file, DamagedError or
    UsageError when the metric that `rules` goes by can't be read."""
    rules.check()
    check_root(root)
    summaries = runs.list_checkpoints(root)
    steps = {summary.name: summary for summary in summaries if runs.is_step_name(summary.name)}
    sizes = {s.name: runs.bytes_on_disk(s.path) if isinstance(s.path, Path) else s.num_bytes for s in summaries}
    candidates = [
        Candidate(s.name, s.step or 0, sizes[s.name], s.complete, s.created, s.pinned) for s in steps.values()
    ]
    metric = None
    if rules.best:
        metric = read_metric(find_metrics(root, work_dir), rules.best.metric)
    reasons = reasons_to_keep(candidates, rules, now=time.time(), metric=metric, in_use=in_use)
    keep, remove, broken = [], [], []
    for candidate in candidates:
        why, fault = ", ".join(reasons[candidate.name]), steps[candidate.name].reason
        if why:
            keep.append(Entry(candidate.name, candidate.num_bytes, why))
        elif candidate.complete:
            remove.append(Entry(candidate.name, candidate.num_bytes, "no rule keeps it"))
        elif (root / candidate.name / _REMOVED_MARK).is_file():
            remove.append(Entry(candidate.name, candidate.num_bytes, _CUT_SHORT))
        elif stale and _is_beyond_use(root / candidate.name):
            remove.append(Entry(candidate.name, candidate.num_bytes, fault))
        else:
            broken.append(Entry(candidate.name, candidate.num_bytes, fault))
    for summary in summaries:
        if summary.kind == "staging" and isinstance(summary.path, Path) and is_stale(summary.path):
            entry = Entry(summary.name, sizes[summary.name], summary.reason)
            is_save = runs.is_step_name(target_of(summary.path).name)
            (remove if stale or (dead_saves and is_save) else broken).append(entry)
    for path in _half_removed(root):
        remove.append(Entry(path.name, runs.bytes_on_disk(path), _CUT_SHORT))
    return PrunePlan(root, tuple(keep), tuple(remove), tuple(broken))


def _half_removed(root: Place) -> list[Path]:
    """What killed removals have left."""
    found = sorted(root.glob(f".*{_REMOVED_MARK}")) if isinstance(root, Path) else []
    return [path for path in found if runs.is_step_name(path.name[1:].removesuffix(_REMOVED_MARK))]


def _best_rule(best: tuple[str, str, int] | None) -> KeepBest | None:
    return KeepBest(best[0], best[2], best[1]) if best else None


def _is_beyond_use(path: Place) -> bool:
    """True when the checkpoint is damaged for sure, rather than unreadable for now or of a kind not understood.

    In a store it may be one that is on its way, which shows by files that have just come.
    """
    if isinstance(path, StorePath) and time.time() - path.stat().st_mtime < UPLOAD_SILENCE_SECONDS:
        return False
    try:
        read_manifest(path)
    except (DamagedError, NotFoundError):
        return True
    except CkptoolError:
        return False
    return False


def _execute(plan: PrunePlan) -> tuple[list[str], dict[str, str]]:
    """Remove what the plan says, oldest first. Returns the names removed, and those that failed with the cause."""
    removed: list[str] = []
    failed: dict[str, str] = {}
    if isinstance(plan.root, StorePath):
        plan.root.store.refresh()
    for entry in plan.remove:
        path = plan.root / entry.name
        try:
            if isinstance(path, Path) and is_staging(path):
                _remove_staging(path)
            elif isinstance(path, Path) and entry.name.endswith(_REMOVED_MARK):
                _remove_tree(path)
            else:
                _check_still_removable(plan, entry.name)
                remove_checkpoint(path)
            removed.append(entry.name)
        except CkptoolError as error:
            failed[entry.name] = str(error)
    return removed, failed


def _check_still_removable(plan: PrunePlan, name: str) -> None:
    """The world may have changed since the plan was made: a new pin, or the newest checkpoint lost."""
    if name in read_pins(plan.root):
        raise StorageError(f"{name} was pinned meanwhile")
    latest = runs.find_latest(plan.root)
    if latest is None or latest.path.name == name:
        raise StorageError(f"{name} is the last good checkpoint now: what was to stay is damaged or gone")


def remove_checkpoint(path: Place) -> None:
    """Remove a checkpoint: under its name at once, in a store by its marker first.

    Raises StorageError or AccessError when the disk refuses; the rest of it then lies there, for the next prune.
    """
    if isinstance(path, StorePath):
        _remove_in_store(path)
        return
    if path.is_symlink():
        raise StorageError(f"{path} is a link; what it leads to is not removed")
    aside = path.with_name(f".{path.name}{_REMOVED_MARK}")
    if aside.exists():
        _remove_tree(aside)
    with os_errors(path), contextlib.suppress(FileNotFoundError):  # gone: another process removes it
        path.rename(aside)
        fsync_path(path.parent)
    _remove_tree(aside)


def _remove_in_store(path: StorePath) -> None:
    for marker in MARKERS:
        if (path / marker).is_file():
            path.store.remove((path / marker).key)
    with contextlib.suppress(StorageError):  # a full disk behind sftp: removing is what helps
        path.store.put_bytes((path / _REMOVED_MARK).key, b"removed\n")
    path.store.remove_below(path.key, last=_REMOVED_MARK)


def _remove_staging(path: Path) -> None:
    """Remove what a dead writer left, unless another one has just taken it over."""
    recover(target_of(path))
    if owner_of(path) is None:
        _remove_tree(path)
    elif path.exists():
        acquire(path).release()
        if path.exists():
            raise StorageError(f"{path} could not be removed")


def _remove_tree(path: Path) -> None:
    faults: list[OSError] = []

    def note(function: Any, name: str, information: Any) -> None:
        if not isinstance(information[1], FileNotFoundError):
            faults.append(information[1])

    shutil.rmtree(path, onerror=note)
    if faults:
        raise explain_os_error(faults[0], faults[0].filename or path)
    with os_errors(path.parent):
        fsync_path(path.parent)
