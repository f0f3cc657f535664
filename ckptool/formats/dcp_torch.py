"""Manifest -> torch's own Metadata -> the `.metadata` file, as DCP's FileSystemWriter would have written it."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.errors import DamagedError, MismatchError
from ckptool.formats.dcp_metadata import METADATA_FILE
from ckptool.storage.digest import TensorDigest
from ckptool.storage.digests_file import FileDigest, TensorRecord
from ckptool.storage.files import os_errors
from ckptool.storage.hashing import write_digests
from ckptool.storage.seal import seal

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def to_torch_metadata(manifest: Manifest) -> Metadata:
    """The torch object that says the same as `manifest`. Every chunk needs a locator, but for empty ones."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for fqn, item in manifest.objects.items():
        entries[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = _storage_info(item.locator, fqn)
    for fqn, entry in manifest.tensors.items():
        chunks = stored_chunks(entry)
        entries[fqn] = _tensor_metadata(entry, chunks)
        for i, chunk in enumerate(chunks):
            places[MetadataIndex(fqn, chunk.box.offsets, i)] = _storage_info(chunk.locator, fqn)
    metadata = Metadata(entries, dict(manifest.paths), places, StorageMeta())
    stamp_version(metadata)
    return metadata


def stored_chunks(entry: TensorEntry) -> Sequence[Chunk]:
    """The chunks that torch's metadata lists: all but the empty ones that nobody stored."""
    if all(chunk.locator is not None for chunk in entry.chunks):
        return entry.chunks
    return [chunk for chunk in entry.chunks if chunk.locator is not None or chunk.box.num_elements]


def add_aliases(metadata: Metadata, ties: Mapping[str, str]) -> None:
    """List each alias fqn of `ties` beside its canonical fqn, with the same chunks at the same places.

    So a template with either name, or both, loads with stock `dcp.load`, and the bytes exist once. Raises
    MismatchError when a canonical tensor is not in the checkpoint or an alias is already in it.
    """
    for alias, canonical in ties.items():
        if alias in metadata.state_dict_metadata:
            raise MismatchError(f"{alias} is tied to {canonical}, but is being saved as a tensor of its own")
        if canonical not in metadata.state_dict_metadata:
            raise MismatchError(f"{alias} is tied to {canonical}, which is not among the saved tensors")
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[canonical]
        if metadata.planner_data is not None and canonical in metadata.planner_data:
            metadata.planner_data.setdefault(alias, alias_path(alias, metadata.planner_data[canonical]))
    by_canonical: dict[str, list[str]] = {}
    for alias, canonical in ties.items():
        by_canonical.setdefault(canonical, []).append(alias)
    for index, place in list(metadata.storage_data.items()):
        for alias in by_canonical.get(index.fqn, ()):
            metadata.storage_data[dataclasses.replace(index, fqn=alias)] = place


def alias_path(alias: str, canonical_path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The keys to an alias: below the same top-level key as its canonical tensor, the rest of its fqn as one name."""
    head = canonical_path[0]
    return (head, alias.removeprefix(f"{head}.")) if alias.startswith(f"{head}.") else (alias,)


def stamp_version(metadata: Metadata) -> None:
    """Record the version of DCP's format, in torch releases whose metadata has one."""
    from torch.distributed.checkpoint import filesystem

    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version


def commit(
    folder: Path,
    metadata: Metadata,
    ties: Mapping[str, str],
    files: Mapping[str, FileDigest],
    tensors: Mapping[str, TensorDigest],
) -> None:
    """Finish a checkpoint folder whose data files and sidecars are all there: `digests.json`, then `.metadata`.

    `files` are the digests of the data files, `tensors` those of the tensors (an empty one may be left out). The
    aliases of `ties` are listed. Raises MismatchError as `add_aliases` does.
    """
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    records = {
        fqn: TensorRecord(
            str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size), tensors.get(fqn, TensorDigest())
        )
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    add_aliases(metadata, ties)
    metadata.storage_meta = StorageMeta(save_id=write_digests(folder, files, records))
    write_metadata(folder, metadata)


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write `.metadata`, sealed, through a temporary name, so that it is there whole or not at all."""
    temporary = folder / f"{METADATA_FILE}.tmp"
    with os_errors(folder):
        temporary.write_bytes(seal(pickle.dumps(metadata)))
        os.replace(temporary, folder / METADATA_FILE)


def _tensor_metadata(entry: TensorEntry, stored: Sequence[Chunk]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in stored]
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), chunks)


def _storage_info(locator: Locator | None, fqn: str) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    if locator is None:
        raise DamagedError(f"{fqn} was planned, but not all of it was written")
    return _StorageInfo(locator.file, locator.offset, locator.length)
