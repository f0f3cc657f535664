"""A folder of checkpoints held by one run: two would save in each other's way, and a resume would mix them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from ckptool.errors import LockedError
from ckptool.storage.files import Place, os_errors
from ckptool.storage.lock import Lock, acquire, is_stale, owner_of

_FOLDER = ".run.lock"


def hold_root(root: Path, gone: str = "") -> Lock:
    """Hold a folder of checkpoints for this process, until `release()` of what is returned. A holder that has died is
    replaced: one of this machine at once, one of another machine after five minutes in which nothing was heard of it,
    or at once when the caller knows that it has: `gone` is the `name` of what was returned to it.

    Raises LockedError that names a living holder, StorageError or AccessError when the disk refuses.
    """
    folder = Path(root) / _FOLDER
    with os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        holder = owner_of(folder)
        if holder is not None and holder.file_name == gone:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
    try:
        return acquire(folder)
    except LockedError as error:
        raise LockedError(
            f"another run has {root}: {owner_of(folder) or 'it is just ending'}",
            hint=f"stop that one, or choose another root; if it is gone for good: rm -r {folder}",
        ) from error


def is_held(root: Place) -> bool | None:
    """Whether a run that lives has the folder; None where that can't be seen, at a URL."""
    if not isinstance(root, Path):
        return None
    folder = root / _FOLDER
    return folder.is_dir() and not is_stale(folder)
