"""Pins: `.pins/NAME.json` in a run root marks NAME as not to be removed. The checkpoint itself is not touched."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping

from ckptool.errors import CkptoolError, NotFoundError
from ckptool.storage.files import Place, fsync_path, os_errors, read_json, write_json
from ckptool.storage.store_path import StorePath

PINS_FOLDER = ".pins"
_SUFFIX = ".json"
_MAX_BYTES = 1 << 20


def read_pins(root: Place) -> dict[str, str]:
    """The names that are pinned, with the reason given ("" for none, or for one that can't be read: a pin holds)."""
    folder = root / PINS_FOLDER
    with os_errors(folder):
        files: list[Place] = sorted(folder.iterdir()) if folder.is_dir() else []
    pins = [file for file in files if file.suffix == _SUFFIX and not file.name.startswith(".")]
    return {file.name.removesuffix(_SUFFIX): _reason(file) for file in pins}


def write_pin(root: Place, name: str, record: Mapping[str, str]) -> None:
    """Pin `name`; once this returns, the pin is on the disk, or in the store."""
    folder = root / PINS_FOLDER
    file = folder / f"{name}{_SUFFIX}"
    if isinstance(file, StorePath):
        file.store.put_bytes(file.key, json.dumps(dict(record)).encode())
        return
    partial = file.with_name(f".{name}-{secrets.token_hex(4)}")
    with os_errors(file):
        file.parent.mkdir(exist_ok=True)
        write_json(partial, dict(record))
        fsync_path(partial)
        os.replace(partial, file)
        fsync_path(file.parent)
        fsync_path(file.parent.parent)


def remove_pin(root: Place, name: str) -> None:
    """Raises NotFoundError when `name` is not pinned."""
    pins = read_pins(root)
    if name not in pins:
        raise NotFoundError(f"{name} is not pinned", hint=f"pinned: {', '.join(pins) or 'nothing'}")
    file = root / PINS_FOLDER / f"{name}{_SUFFIX}"
    if isinstance(file, StorePath):
        file.store.remove(file.key)
        return
    with os_errors(file):
        file.unlink(missing_ok=True)
        fsync_path(file.parent)


def _reason(file: Place) -> str:
    try:
        record = read_json(file, _MAX_BYTES)
    except CkptoolError:
        return ""
    reason = record.get("reason") if isinstance(record, dict) else None
    return reason if isinstance(reason, str) else ""
