"""What every writing command settles before it starts: where to write, in which dtype, and whether it fits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptool.core.dtypes import DTYPE_OPTIONS
from ckptool.core.plan import Plan
from ckptool.errors import StorageError, UsageError
from ckptool.runs import default_root


def new_target(name: str, root: Path | None) -> Path:
    """The path of a checkpoint to be made: `name` itself when it has a folder in it, else below the root."""
    if os.sep in name:
        return Path(name).expanduser().absolute()
    if name in ("", ".", "..") or name.startswith("."):
        raise UsageError(f"{name!r} can't be a checkpoint's name")
    return (root or default_root()).absolute() / name


def refuse_own_source(source: Path, target: Path) -> None:
    """Raise UsageError when overwriting `target` would remove what is being read."""
    if source.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{target} can't be overwritten: {source} is read from it", hint="choose another name")


def checked_dtype(option: str) -> str | None:
    """The torch name for a `--dtype` value; None for "keep"."""
    if option == "keep":
        return None
    if option not in DTYPE_OPTIONS:
        raise UsageError(f"--dtype {option}: choose one of keep, {', '.join(DTYPE_OPTIONS)}")
    return DTYPE_OPTIONS[option]


def check_disk(target: Path, plan: Plan) -> None:
    """Refuse a plan that the target's disk can't hold. Raises StorageError."""
    folder = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < plan.disk_bytes:
        raise StorageError(
            f"{target} needs {plan.disk_bytes / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free",
            hint="free some space, or choose another place",
        )
