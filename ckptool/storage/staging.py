"""Atomic publishing: write into a hidden sibling, flush it to the disk, then rename it to its final name.

A checkpoint under its final name is therefore complete; anything else is a `.NAME.staging-*` folder that nothing reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ckptool.errors import TargetExistsError
from ckptool.storage.files import fsync_path, os_errors

STAGING_MARK = ".staging-"


def staging_path(target: Path) -> Path:
    """A fresh hidden sibling of `target`, on the same filesystem so that the rename is atomic."""
    return target.parent / f".{target.name}{STAGING_MARK}{secrets.token_hex(4)}"


def is_staging(path: Path) -> bool:
    return path.name.startswith(".") and STAGING_MARK in path.name


def refuse_existing(target: Path) -> None:
    """Raise TargetExistsError unless `target` is free (an empty folder counts as free)."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise TargetExistsError(f"{target} already exists", hint="choose another name, or remove it first")


def create_staging(target: Path) -> Path:
    """Make the staging folder for `target`, which must be free."""
    refuse_existing(target)
    staging = staging_path(target)
    with os_errors(staging):
        staging.mkdir(parents=True)
    return staging


def publish(staging: Path, target: Path) -> None:
    """Flush every file and folder of `staging`, rename it to `target`, flush the parent."""
    with os_errors(staging):
        for folder, _, files in os.walk(staging, topdown=False):
            for name in files:
                fsync_path(Path(folder, name))
            fsync_path(Path(folder))
    refuse_existing(target)
    with os_errors(target):
        os.rename(staging, target)
        fsync_path(target.parent)


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield a staging folder; publish it as `target` when the block ends well, remove it when it raises."""
    staging = create_staging(target)
    try:
        yield staging
        publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """The same for a single file: yield a hidden sibling's path, flush and rename it when the block ends well."""
    refuse_existing(target)
    staging = staging_path(target)
    with os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield staging
        with os_errors(target):
            fsync_path(staging)
            refuse_existing(target)
            os.rename(staging, target)
            fsync_path(target.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
