"""What is in one checkpoint: read from `.metadata` and `ckptool.json` alone, without torch."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from typing import Any

from ckptool.core.checkpoint import Manifest
from ckptool.core.plan import Result
from ckptool.core.tensors import TensorEntry
from ckptool.errors import CkptoolError, DamagedError
from ckptool.naming.dialects import find_dialect
from ckptool.naming.sections import read_sections
from ckptool.ops.stored import count_notes, find_stored, read_stored
from ckptool.storage.files import Place, read_json

DATA_POSITION_FILE = "data_position.json"


def inspect(name: str, *, root: Place | None = None, keys: str = "*") -> Result:
    """Describe the checkpoint `name` (a path, a name under `root`, or `latest`).

    `keys` is a glob that fqns must match to be listed; the totals are always of the whole checkpoint. Raises
    NotFoundError for an unknown name, DamagedError or UnsafeError for metadata that can't be trusted.
    """
    path = find_stored(name, root)
    manifest = read_stored(path)
    files = _files(manifest)
    details = {
        "num_tensors": len(manifest.tensors),
        "num_chunks": sum(file["num_chunks"] for file in files),
        "num_bytes": manifest.num_bytes,
        "dtypes": _dtypes(manifest),
        "tensors": [_tensor(t, manifest) for fqn, t in manifest.tensors.items() if fnmatch.fnmatchcase(fqn, keys)],
        "objects": sorted(fqn for fqn in manifest.objects if fnmatch.fnmatchcase(fqn, keys)),
        "files": files,
        **_naming(manifest),
        "provenance": manifest.provenance.to_json() if manifest.provenance else None,
        "data_position": _data_position(path),
    }
    return Result("inspect", str(path), notes=count_notes(path), details=details)


def _naming(manifest: Manifest) -> dict[str, Any]:
    """Entries per section, whose names the model's tensors have ("" for transformers' or unknown ones), and why names
    are not understood, if so."""
    try:
        sections = read_sections(manifest)
    except CkptoolError as error:
        return {"sections": {}, "dialect": "", "wrappers": [], "not_understood": str(error)}
    dialect = find_dialect(sections.model)
    return {
        "sections": sections.counts(),
        "dialect": dialect.name if dialect else "",
        "wrappers": list(sections.wrappers),
        "not_understood": "",
    }


def _tensor(entry: TensorEntry, manifest: Manifest) -> dict[str, Any]:
    return {
        "fqn": entry.fqn,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "num_bytes": entry.num_bytes,
        "num_chunks": len(entry.chunks),
        "tied_to": manifest.ties.get(entry.fqn),
    }


def _dtypes(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Per dtype, how many tensors and how many bytes; a tie's bytes are counted once."""
    dtypes: dict[str, dict[str, int]] = defaultdict(lambda: {"num_tensors": 0, "num_bytes": 0})
    for fqn, entry in manifest.tensors.items():
        dtypes[entry.dtype]["num_tensors"] += 1
        dtypes[entry.dtype]["num_bytes"] += 0 if fqn in manifest.ties else entry.num_bytes
    return dict(sorted(dtypes.items()))


def _files(manifest: Manifest) -> list[dict[str, Any]]:
    """Per data file, its size and the number of stored chunks and objects in it; a tie's chunks are counted once."""
    chunks = Counter(
        chunk.locator.file
        for fqn, entry in manifest.tensors.items()
        if fqn not in manifest.ties
        for chunk in entry.chunks
        if chunk.locator
    )
    objects = Counter(entry.locator.file for entry in manifest.objects.values() if entry.locator)
    return [
        {"name": name, "num_bytes": num_bytes, "num_chunks": chunks[name], "num_objects": objects[name]}
        for name, num_bytes in sorted(manifest.files.items())
    ]


def _data_position(path: Place) -> dict[str, Any] | None:
    file = path / DATA_POSITION_FILE
    if not file.is_file():
        return None
    position = read_json(file)
    if not isinstance(position, dict):
        raise DamagedError(f"{file} is not a data position")
    return position
