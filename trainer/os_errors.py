"""The system's errors as ours, with the file that they are about: a full disk names none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ckptool import StorageError


def as_storage_error(error: OSError, path: Path | str = "input or output") -> StorageError:
    """The same as one of ours, whose cause it is, with the file that it names, or else `path`."""
    named = StorageError(f"{error.filename or path}: {error.strerror or error}")
    named.__cause__ = error
    return named


@contextlib.contextmanager
def named_os_errors(path: Path) -> Iterator[None]:
    """Raises StorageError for an OSError inside, which names its file, or else `path`."""
    try:
        yield
    except OSError as error:
        raise as_storage_error(error, path) from error
