"""Folders for temporary files: gone when the process ends, and when it was killed, with the next one that makes one."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ckptool.storage.files import os_errors
from ckptool.storage.lock import Lock, Owner, owner_of, seconds_silent

_PREFIX = "ckptool-"

#: Whether a process of another machine or container lives can't be seen here. TMPDIR may be shared with it.
_UNSEEN_SILENCE_SECONDS = 7 * 86400.0


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder below TMPDIR, with a file in it that says whose it is.

    What killed processes of this user have left there is removed first, once a process. Raises StorageError or
    AccessError.
    """
    top = Path(tempfile.gettempdir())
    _sweep(top)
    with os_errors(top):
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=top)
        Path(folder.name, Owner.this_process().file_name).touch()
    return folder


@functools.cache
def _sweep(top: Path) -> None:
    with contextlib.suppress(OSError):
        for path in list(top.glob(f"{_PREFIX}*")):
            owner = owner_of(path)
            if owner is not None and _is_mine(path) and _is_gone(owner, path):
                with contextlib.suppress(OSError):
                    Lock(path, owner).clear()  # the owner's file goes last: a kill now leaves it to the next process
                shutil.rmtree(path, ignore_errors=True)


def _is_mine(path: Path) -> bool:
    """A folder of this user, no link to one."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _is_gone(owner: Owner, path: Path) -> bool:
    return owner.is_gone(0.0) or (not owner.is_here() and seconds_silent(path) > _UNSEEN_SILENCE_SECONDS)
