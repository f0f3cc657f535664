"""What is kept of a corpus: its folder under the cache, the record in it, and how both appear at once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import DamagedError
from trainer.sources.stream import TokenPart

#: Part of the key of a cache: another number for other tokens from the same files.
CACHE_VERSION = 2


def cache_folder(root: Path, source: dict[str, str | int]) -> Path:
    key = json.dumps({**source, "cache_version": CACHE_VERSION}, sort_keys=True)
    return root / ".data-cache" / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def write_record(staging: Path, lengths: np.ndarray, fingerprint: dict[str, str], layout: dict[str, Any]) -> None:
    np.save(staging / "lengths.npy", lengths)
    num_tokens, num_documents = int(lengths.sum()), len(lengths)
    digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=16).hexdigest()
    facts = {"num_tokens": num_tokens, "num_documents": num_documents, "document_lengths": digest}
    record = {
        **layout,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "fingerprint": {**facts, **fingerprint},
    }
    (staging / "tokens.json").write_text(json.dumps(record))


def publish(staging: Path, folder: Path) -> None:
    """Everything appears under its name at once; an unfinished cache is never read."""
    for name in ("lengths.npy", "tokens.json"):
        with (staging / name).open("rb") as file:
            os.fsync(file.fileno())
    _fsync_folder(staging)
    os.rename(staging, folder)
    _fsync_folder(folder.parent)


def read_record(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "tokens.json").read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder / 'tokens.json'}: {error}", hint=f"rm -r {folder}") from error


def stored_parts(folder: Path, record: dict[str, Any], suffix: str, dtype: str) -> tuple[TokenPart, ...]:
    parts = tuple(TokenPart(folder / f"{name}{suffix}", dtype, 0, count) for name, count in record["pieces"])
    for part in parts:
        size = part.path.stat().st_size if part.path.is_file() else -1
        if size != part.num_tokens * np.dtype(dtype).itemsize:
            raise DamagedError(f"{part.path} should hold {part.num_tokens} tokens", hint=f"rm -r {folder}")
    return parts


def _fsync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
