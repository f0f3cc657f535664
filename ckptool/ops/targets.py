"""What every writing command settles before it starts: where to write, in which dtype, and whether it fits."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptool.core.dtypes import DTYPE_OPTIONS
from ckptool.core.plan import Plan
from ckptool.errors import StorageError, UsageError
from ckptool.runs import default_root, is_step_name


def new_target(name: str, root: Path | None, may_be_step: bool = False) -> Path:
    """The path of a checkpoint to be made: `name` itself when it has a folder in it, else below the root.

    Raises UsageError for names with a meaning of their own; `may_be_step` allows `step-N`, for copies of such.
    """
    name = name.rstrip(os.sep) or name
    if os.sep in name:
        return Path(name).expanduser().absolute()
    if name in ("", ".", "..", "latest") or name.startswith("."):
        raise UsageError(f"{name!r} can't be a checkpoint's name")
    if is_step_name(name) and not may_be_step:
        raise UsageError(
            f"{name!r} is a name for the checkpoints of a training run, which would take it for its own",
            hint="choose another name, or give a path",
        )
    return (root or default_root()).absolute() / name


def refuse_own_source(source: Path, target: Path) -> None:
    """Raise UsageError when writing `target` would remove, or add to, what is being read."""
    if target.resolve().is_relative_to(source.resolve()) and source.is_dir() and source.resolve() != target.resolve():
        raise UsageError(f"{target} lies inside {source}, which is being read", hint="choose another place")
    if source.resolve().is_relative_to(target.resolve()):
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


def check_disk(target: Path, plan: Plan, freed_bytes: int = 0) -> None:
    """Refuse a plan that the target's disk can't hold, `freed_bytes` of it as it goes on. Raises StorageError."""
    folder = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    needed = plan.disk_bytes - freed_bytes
    if free < needed:
        raise StorageError(
            f"{target} needs {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free",
            hint="free some space, or choose another place",
        )
