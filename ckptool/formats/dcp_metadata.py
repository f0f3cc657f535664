"""`.metadata` of a torch distributed checkpoint (DCP) -> Manifest: no torch, and nothing that it pickles is run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import MAX_DIMS, Chunk, Locator, ObjectEntry, TensorEntry, is_possible_shape
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError
from ckptool.formats import dcp_stubs as stubs
from ckptool.storage import safe_pickle
from ckptool.storage.digests_file import is_ours
from ckptool.storage.files import os_errors, read_json, safe_join
from ckptool.storage.pickle_scan import MAX_PICKLE_BYTES
from ckptool.storage.safe_pickle import describe
from ckptool.storage.seal import unseal

METADATA_FILE = ".metadata"
PROVENANCE_FILE = "ckptool.json"
MODEL_PREFIX = "model."

#: By fqn and by the chunk's offsets as text: a tuple of integers can be chosen to have any hash, a string can't.
_Locators = dict[tuple[str, str], Locator]


def read_manifest(path: Path | str) -> Manifest:
    """Read and check everything a checkpoint folder says about itself.

    Raises NotFoundError when `path` is no DCP folder (the hint names checkpoints inside it), DamagedError when it is
    incomplete or contradicts itself, UnsafeError when it wants to run code or to read outside its folder, and
    UnsupportedError when its bytes were transformed (compressed, encrypted) by an extension.
    """
    folder = Path(path)
    manifest = parse_manifest(folder, read_provenance(folder))
    manifest.check_cover()
    check_sizes(manifest)
    return manifest


def parse_manifest(folder: Path, provenance: Provenance | None) -> Manifest:
    """What `.metadata` says, not yet held against itself and the files: `read_manifest` without its last two checks.

    Raises what `read_manifest` raises.
    """
    location = str(folder / METADATA_FILE)
    raw, sealed = unseal(_read_metadata_file(folder), location)
    with _no_garbage_collection():
        metadata = safe_pickle.load(raw, stubs.METADATA_GLOBALS, location)
        manifest = _to_manifest(metadata, folder, provenance)
    if is_ours(manifest.save_id) and not sealed:
        raise DamagedError(f"{location} was changed or cut short since it was written: its own checksum is gone")
    return manifest


def read_provenance(path: Path | str) -> Provenance | None:
    """The content of a checkpoint's `ckptool.json`; None when it has none. Raises DamagedError when it is malformed."""
    file = Path(path) / PROVENANCE_FILE
    return Provenance.from_json(read_json(file), str(file)) if file.exists() else None


def is_checkpoint(path: Path) -> bool:
    """True for a folder with a `.metadata` file."""
    return (path / METADATA_FILE).is_file()


def checkpoints_inside(folder: Path, max_depth: int = 2) -> list[Path]:
    """The checkpoint folders below `folder`, sorted; hidden folders are not looked into."""
    found: list[Path] = []
    for child in sorted(folder.iterdir()) if max_depth and folder.is_dir() else []:
        if child.is_dir() and not child.name.startswith("."):
            found += [child] if is_checkpoint(child) else checkpoints_inside(child, max_depth - 1)
    return found


def _read_metadata_file(folder: Path) -> bytes:
    file = folder / METADATA_FILE
    with os_errors(file):
        if file.is_file():
            if file.stat().st_size > MAX_PICKLE_BYTES:
                raise DamagedError(f"{file} is larger than any real checkpoint's metadata")
            return file.read_bytes()
        if not folder.exists():
            raise NotFoundError(f"no such checkpoint: {folder}")
        if not folder.is_dir():
            raise NotFoundError(f"{folder} is a file, not a checkpoint folder")
        if any(folder.glob("*.distcp")):
            raise DamagedError(
                f"{folder} is incomplete: it has data files but no .metadata, which is written last",
                hint="the save did not finish; use an earlier checkpoint",
                kind="missing",
            )
        inside = checkpoints_inside(folder)
    names = ", ".join(str(path) for path in inside[:5])
    raise NotFoundError(
        f"{folder} is not a checkpoint: it has no .metadata", hint=f"did you mean {names}?" if names else ""
    )


def _to_manifest(metadata: Any, folder: Path, provenance: Provenance | None) -> Manifest:
    location = str(folder / METADATA_FILE)
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, stubs.Metadata) or not isinstance(entries, dict):
        raise DamagedError(f"{location} does not hold checkpoint metadata")
    locators, files = _read_locators(metadata, folder, location)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for fqn, entry in entries.items():
        if not isinstance(fqn, str):
            raise DamagedError(f"{location}: an entry's name is not a string")
        if isinstance(entry, stubs.BytesStorageMetadata):
            objects[fqn] = ObjectEntry(fqn, _take(locators, fqn, None, location))
        elif isinstance(entry, stubs.TensorStorageMetadata):
            tensors[fqn] = _read_tensor(fqn, entry, locators, location)
        else:
            raise DamagedError(f"{location}: {fqn} is neither a tensor nor an object")
    if locators:
        raise DamagedError(f"{location}: stored bytes for {next(iter(locators))[0]}, which is not among the entries")
    return Manifest(
        location=str(folder),
        tensors=tensors,
        objects=objects,
        paths=_read_paths(metadata.planner_data, location),
        ties=_find_ties(tensors, provenance),
        files=files,
        provenance=provenance,
        save_id=_read_save_id(metadata),
    )


def _read_save_id(metadata: stubs.Metadata) -> str:
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) else ""


def _read_locators(metadata: stubs.Metadata, folder: Path, location: str) -> tuple[_Locators, dict[str, int]]:
    """(fqn, chunk offsets) -> where the bytes lie, and the sizes in bytes of the files that exist."""
    storage_data = getattr(metadata, "storage_data", None)
    if not isinstance(storage_data, dict):
        raise DamagedError(f"{location} does not say where its bytes are")
    locators: _Locators = {}
    files: dict[str, int] = {}
    for index, info in storage_data.items():
        if not isinstance(index, stubs.MetadataIndex) or not isinstance(info, stubs.StorageInfo):
            raise DamagedError(f"{location}: damaged storage record {describe(index)}")
        try:
            fqn, offsets = index.fqn, index.offset
            locator = Locator(info.relative_path, info.offset, info.length)
        except AttributeError as error:
            raise DamagedError(f"{location}: a storage record lacks a field: {error}") from error
        if not (type(fqn) is str and (offsets is None or _is_shape(offsets)) and _is_locator(locator)):
            raise DamagedError(f"{location}: damaged storage record of {describe(fqn)}")
        if info.transform_descriptors:
            transform = describe(info.transform_descriptors)
            raise UnsupportedError(f"{location}: {fqn} is stored transformed by {transform}")
        if locator.file not in files:
            file = safe_join(folder, locator.file)
            files[locator.file] = file.stat().st_size if file.is_file() else -1
        if (fqn, str(offsets)) in locators:
            raise DamagedError(f"{location}: two places for the same chunk of {fqn}")
        locators[fqn, str(offsets)] = locator
    return locators, {name: size for name, size in files.items() if size >= 0}


def _read_tensor(fqn: str, entry: stubs.TensorStorageMetadata, locators: _Locators, location: str) -> TensorEntry:
    try:
        dtype, shape, stored = entry.properties.dtype, entry.size, entry.chunks
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in stored]
    except (AttributeError, TypeError) as error:
        raise DamagedError(f"{location}: tensor {fqn}: {error}") from error
    if not isinstance(dtype, str) or dtype not in ITEMSIZE_BYTES:
        dtype_name = dtype if isinstance(dtype, str) else describe(dtype)
        raise UnsupportedError(f"{location}: tensor {fqn} has the unknown dtype {dtype_name}")
    if not _is_shape(shape) or not all(_is_shape(box.offsets) and _is_shape(box.sizes) for box in boxes):
        raise DamagedError(f"{location}: tensor {fqn} has an impossible shape")
    if not is_possible_shape(shape):
        raise DamagedError(f"{location}: tensor {fqn} has an impossible shape: {list(shape)}")
    filled = {str(box.offsets): _take(locators, fqn, box.offsets, location) for box in boxes if box.num_elements}
    # Ranks without rows leave empty chunks, which may share their offsets with each other or with a filled one.
    chunks = [
        Chunk(box, filled[str(box.offsets)] if box.num_elements else locators.pop((fqn, str(box.offsets)), None))
        for box in boxes
    ]
    return TensorEntry(fqn, dtype, shape, tuple(chunks))


def _is_shape(dims: Any) -> bool:
    if type(dims) is not tuple or len(dims) > MAX_DIMS:
        return False
    return not dims or (set(map(type, dims)) == {int} and min(dims) >= 0 and max(dims) < 1 << 63)


def _is_locator(locator: Locator) -> bool:
    return type(locator.file) is str and type(locator.offset) is type(locator.length) is int


def _take(locators: _Locators, fqn: str, offsets: tuple[int, ...] | None, location: str) -> Locator:
    locator = locators.pop((fqn, str(offsets)), None)
    if locator is None:
        place = "" if offsets is None else f" the chunk at {list(offsets)} of"
        raise DamagedError(f"{location}: it does not say where{place} {fqn} is stored")
    return locator


def _read_paths(planner_data: Any, location: str) -> dict[str, tuple[str | int, ...]]:
    if planner_data is None:
        return {}
    if not isinstance(planner_data, dict) or not all(
        isinstance(fqn, str) and isinstance(path, tuple) and all(isinstance(key, str | int) for key in path)
        for fqn, path in planner_data.items()
    ):
        raise DamagedError(f"{location}: damaged planner data")
    return dict(planner_data)


def _find_ties(tensors: Mapping[str, TensorEntry], provenance: Provenance | None) -> dict[str, str]:
    """alias -> canonical, for tensors whose chunks lie at the very same places."""
    aliases = {MODEL_PREFIX + name for name in provenance.ties} if provenance else set()
    groups: dict[tuple, list[str]] = {}
    for fqn, entry in tensors.items():
        if entry.num_elements:
            groups.setdefault((entry.dtype, entry.shape, entry.chunks), []).append(fqn)
    ties = {}
    for names in groups.values():
        canonical = next((name for name in names if name not in aliases), names[0])
        ties.update({name: canonical for name in names if name != canonical})
    return ties


def check_sizes(manifest: Manifest) -> None:
    """The files must be able to hold what the tensors claim: a small checkpoint can't unfold into a huge one.

    Raises DamagedError.
    """
    for fqn, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            num_bytes = chunk.box.num_elements * entry.itemsize_bytes
            if chunk.locator is not None and num_bytes > chunk.locator.length:
                raise DamagedError(
                    f"{manifest.location}: a chunk of {fqn} needs {num_bytes} bytes, "
                    f"but {chunk.locator.length} are stored"
                )
    if manifest.num_bytes > sum(manifest.files.values()):
        raise DamagedError(
            f"{manifest.location}: the tensors claim {manifest.num_bytes} bytes, more than all data files hold"
        )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects, none of them garbage: the collector would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
