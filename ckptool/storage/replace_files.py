"""Some small files of a checkpoint in a store replaced together: whole or not at all, as far as a store allows it.

A store has no rename. So the new files go into a hidden folder first, its marker last; from there on they count, and
are put in place one after the other, `.metadata` last. A process that dies meanwhile leaves the folder, and the next
change begins with finishing that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptool.errors import StorageError
from ckptool.storage.digest import digest_file
from ckptool.storage.files import MAX_JSON_BYTES, read_bytes
from ckptool.storage.store import StoredFile
from ckptool.storage.store_path import StorePath

CHANGE_FOLDER = ".ckptool-change"
_MARKER = ".metadata"

#: As large a `.metadata` as is read at all.
_MAX_BYTES = 16 * MAX_JSON_BYTES


def replace_files(target: StorePath, content: Path, read_from: StoredFile) -> None:
    """Put the files of the folder `content`, `.metadata` among them, into the checkpoint `target`.

    They were made of a checkpoint whose `.metadata` was `read_from`. Raises StorageError when it is another one by now,
    or something does not read back as it was written.
    """
    for name in _marker_last(path.name for path in content.iterdir()):
        staged = target / CHANGE_FOLDER / name
        staged.store.put(staged.key, content / name)
        if digest_file(staged) != digest_file(content / name):
            raise StorageError(f"{staged} does not read back as it was written", hint="try again")
    target.store.refresh()
    marker = target / _MARKER
    if target.store.files.get(marker.key) != read_from:
        raise StorageError(f"{marker} was changed meanwhile: does something else write to {target}?", hint="try again")
    finish_replacing(target)


def finish_replacing(target: StorePath) -> None:
    """Put in place what a change has brought up, or remove it when that was not all of it."""
    folder = target / CHANGE_FOLDER
    names = list(_marker_last(folder.names_below()))
    if _MARKER in names:
        for name in names:
            final = target / name
            final.store.put_bytes(final.key, read_bytes(folder / name, _MAX_BYTES))
    for name in reversed(names):
        target.store.remove((folder / name).key)


def _marker_last(names: Iterator[str]) -> Iterator[str]:
    yield from sorted(names, key=lambda name: (name == _MARKER, name))
