"""`digests.json`: what every file and every tensor of a checkpoint was when it was written.

The commit marker covers it: `.metadata` carries, as DCP's `save_id`, the BLAKE3 of this file's bytes. So neither
`.metadata` nor this file is listed in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from ckptool.errors import DamagedError
from ckptool.storage.digest import ALGORITHM, TensorDigest, digest_file
from ckptool.storage.files import MAX_JSON_BYTES, Place, read_bytes, read_json

DIGESTS_FILE = "digests.json"
FORMAT_VERSION = 1
_SAVE_ID_PREFIX = "ckptool-digests-blake3-"


@dataclass(frozen=True)
class FileDigest:
    """A file's length and the BLAKE3 of its bytes, in hex."""

    num_bytes: int
    blake3: str


@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor, whatever its sharding: dtype, shape and the digest of its elements."""

    dtype: str
    shape: tuple[int, ...]
    digest: TensorDigest


@dataclass(frozen=True)
class Digests:
    """The content of `digests.json`: files by name relative to the checkpoint, tensors by fqn (aliases left out)."""

    files: Mapping[str, FileDigest]
    tensors: Mapping[str, TensorRecord]

    def to_bytes(self) -> bytes:
        """The file's bytes; equal digests give equal bytes."""
        record = {
            "format_version": FORMAT_VERSION,
            "algorithms": {"files": "blake3", "tensors": ALGORITHM},
            "files": {n: {"bytes": f.num_bytes, "blake3": f.blake3} for n, f in sorted(self.files.items())},
            "tensors": {
                fqn: {"dtype": t.dtype, "shape": list(t.shape), "digest": str(t.digest)}
                for fqn, t in sorted(self.tensors.items())
            },
        }
        return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def save_id_for(digests_bytes: bytes) -> str:
    """What `.metadata` must carry as `save_id` to cover this content of `digests.json`."""
    return _SAVE_ID_PREFIX + blake3(digests_bytes).hexdigest()


def is_ours(save_id: str) -> bool:
    """True for what `save_id_for` returns: the checkpoint was written with digests, and its `.metadata` sealed."""
    return save_id.startswith(_SAVE_ID_PREFIX)


def weights_digest(folder: Place) -> str:
    """SHA-256 over the records of the model's tensors, whatever their sharding; empty for a checkpoint without digests.

    An adapter's checkpoint names the weights that it belongs to by this.
    """
    path = folder / DIGESTS_FILE
    if not path.exists():
        return ""
    weights = {name: record for name, record in read_json(path)["tensors"].items() if name.startswith("model.")}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


def is_as_written(folder: Place, name: str) -> bool:
    """False when a file of a checkpoint is not the one of its `digests.json`. What that doesn't list is as written."""
    path = folder / DIGESTS_FILE
    listed = read_json(path)["files"].get(name) if path.exists() else None
    return listed is None or digest_file(folder / name) == listed["blake3"]


def read_digests(folder: Place, save_id: str) -> Digests | None:
    """The folder's digests, or None when the checkpoint was written without any.

    `save_id` is what `.metadata` carries. Raises DamagedError when the file is absent though `.metadata` names it, was
    changed, or is not of this form.
    """
    path = folder / DIGESTS_FILE
    covered = is_ours(save_id)
    if not path.exists():
        if covered:
            raise DamagedError(f"{path} is missing, and .metadata says that it was written")
        return None
    if save_id_for(read_bytes(path, MAX_JSON_BYTES)) != save_id:
        raise DamagedError(f"{path} is not the one that .metadata was written with: it was changed or replaced")
    return _parse(read_json(path), path)


def _parse(record: Any, path: Place) -> Digests:
    try:
        if record["format_version"] != FORMAT_VERSION or record["algorithms"]["tensors"] != ALGORITHM:
            raise DamagedError(
                f"{path}: written in a form that this ckptool doesn't know", hint="pip install -U ckptool"
            )
        files = {name: FileDigest(int(f["bytes"]), str(f["blake3"])) for name, f in record["files"].items()}
        tensors = {
            fqn: TensorRecord(str(t["dtype"]), tuple(map(int, t["shape"])), TensorDigest.parse(t["digest"], str(path)))
            for fqn, t in record["tensors"].items()
        }
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{path}: not a digests file: {error}") from error
    return Digests(files, tensors)
