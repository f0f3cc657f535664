"""Pins: `.pins/NAME.json` in a run root marks NAME as not to be removed. The checkpoint itself is not touched."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ckptool.errors import CkptoolError, NotFoundError
from ckptool.storage.files import fsync_path, os_errors, read_json, write_json

PINS_FOLDER = ".pins"
_SUFFIX = ".json"
_MAX_BYTES = 1 << 20


def read_pins(root: Path) -> dict[str, str]:
    """The names that are pinned, with the reason given ("" for none, or for one that can't be read: a pin holds)."""
    folder = root / PINS_FOLDER
    with os_errors(folder):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
    pins = [file for file in files if file.suffix == _SUFFIX and not file.name.startswith(".")]
    return {file.name.removesuffix(_SUFFIX): _reason(file) for file in pins}


def write_pin(root: Path, name: str, record: Mapping[str, str]) -> None:
    """Pin `name`; once this returns, the pin is on the disk."""
    folder = root / PINS_FOLDER
    file = folder / f"{name}{_SUFFIX}"
    partial = folder / f".{name}-{secrets.token_hex(4)}"
    with os_errors(file):
        folder.mkdir(exist_ok=True)
        write_json(partial, dict(record))
        fsync_path(partial)
        os.replace(partial, file)
        fsync_path(folder)
        fsync_path(root)


def remove_pin(root: Path, name: str) -> None:
    """Raises NotFoundError when `name` is not pinned."""
    file = root / PINS_FOLDER / f"{name}{_SUFFIX}"
    with os_errors(file):
        try:
            file.unlink()
        except FileNotFoundError as error:
            pinned = ", ".join(read_pins(root)) or "nothing"
            raise NotFoundError(f"{name} is not pinned", hint=f"pinned: {pinned}") from error
        fsync_path(file.parent)


def _reason(file: Path) -> str:
    try:
        record = read_json(file, _MAX_BYTES)
    except CkptoolError:
        return ""
    reason = record.get("reason") if isinstance(record, dict) else None
    return reason if isinstance(reason, str) else ""
