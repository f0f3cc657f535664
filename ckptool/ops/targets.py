"""What every writing command settles before it starts: where to write, in which dtype, and whether it fits."""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.dtypes import DTYPE_OPTIONS
from ckptool.core.plan import Plan
from ckptool.core.text import size
from ckptool.errors import StorageError, UsageError
from ckptool.runs import default_root, is_step_name
from ckptool.storage.files import Place
from ckptool.storage.place import inside, place
from ckptool.storage.staging import staged_bytes
from ckptool.storage.store_path import StorePath

if TYPE_CHECKING:
    from ckptool.ranks import Ranks


def new_target(name: str, root: Place | None, may_be_step: bool = False) -> Place:
    """The path of a checkpoint to be made: `name` itself when it has a folder in it, else below the root.

    Raises UsageError for names with a meaning of their own; `may_be_step` allows `step-N`, for copies of such.
    """
    name = name.rstrip(os.sep) or name
    if os.sep in name:
        return place(name).absolute()
    if name in ("", ".", "..", "latest") or name.startswith("."):
        raise UsageError(f"{name!r} can't be a checkpoint's name")
    if is_step_name(name) and not may_be_step:
        raise UsageError(
            f"{name!r} is a name for the checkpoints of a training run, which would take it for its own",
            hint="choose another name, or give a path",
        )
    return inside((root or default_root()).absolute(), name)


def refuse_own_source(source: Place, target: Place) -> None:
    """Raise UsageError when writing `target` would remove, or add to, what is being read."""
    source, target = source.resolve(), target.resolve()
    if type(source) is not type(target):
        return
    if target.is_relative_to(source) and source.is_dir() and source != target:  # type: ignore[arg-type]
        raise UsageError(f"{target} lies inside {source}, which is being read", hint="choose another place")
    if source.is_relative_to(target):  # type: ignore[arg-type]
        raise UsageError(f"{target} can't be overwritten: {source} is read from it", hint="choose another name")


def checked_dtype(option: str) -> str | None:
    """The torch name for a `--dtype` value; None for "keep"."""
    if option == "keep":
        return None
    if option not in DTYPE_OPTIONS:
        raise UsageError(f"--dtype {option}: choose one of keep, {', '.join(DTYPE_OPTIONS)}")
    return DTYPE_OPTIONS[option]


def chooser(keys: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Which names the globs of `--keys` (none: all) and `--exclude` choose."""

    def is_chosen(name: str) -> bool:
        wanted = not keys or any(fnmatch.fnmatchcase(name, glob) for glob in keys)
        return wanted and not any(fnmatch.fnmatchcase(name, glob) for glob in exclude)

    return is_chosen


def check_disk(target: Place, plan: Plan, freed_bytes: int = 0, ranks: Ranks | None = None) -> None:
    """Refuse a plan that the target's disk can't hold, but for `freed_bytes` that it gets back as the work goes on.

    What an interrupted attempt has staged is kept, or else removed before anything is written: either way its place on
    the disk is the plan's. Into a store, only what is being written lies on a disk: that of temporary files. `ranks`,
    which all call this, have all looked before one of them changes anything. Raises StorageError.
    """
    check = functools.partial(_check, target, plan, freed_bytes)
    if ranks:
        ranks.agree("conversion", check)
    else:
        check()


def _check(target: Place, plan: Plan, freed_bytes: int) -> None:
    if isinstance(target, StorePath):
        largest = max((part.write_bytes for part in plan.parts), default=0)
        _check_free(Path(tempfile.gettempdir()), min(plan.disk_bytes, largest * plan.num_workers))
    else:
        _check_free(target, plan.disk_bytes - freed_bytes, staged_bytes(target))


def _check_free(target: Path, needed: int, there: int = 0) -> None:
    folder = next(parent for parent in (target, *target.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed - there:
        raise StorageError(
            f"{target} needs {size(needed - there)} {'more ' if there else ''}and its disk has {size(free)} free",
            hint="free some space, or choose another place",
        )
