"""`.metadata` of a torch distributed checkpoint (DCP) -> Manifest: no torch, and nothing that it pickles is run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.collector import no_garbage_collection
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import MAX_DIMS, Chunk, Locator, ObjectEntry, TensorEntry, is_possible_shape
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError
from ckptool.formats import dcp_stubs as stubs
from ckptool.storage import safe_pickle
from ckptool.storage.digests_file import is_ours
from ckptool.storage.files import Place, os_errors, read_bytes, read_json, safe_join
from ckptool.storage.pickle_scan import MAX_PICKLE_BYTES
from ckptool.storage.place import place
from ckptool.storage.safe_pickle import describe, pairs
from ckptool.storage.seal import unseal

METADATA_FILE = ".metadata"
PROVENANCE_FILE = "ckptool.json"
MODEL_PREFIX = "model."

#: The offsets of a stored chunk, not yet looked at (None for an object), and where its bytes lie.
_Place = tuple[Any, Locator]


def read_manifest(path: Place | str) -> Manifest:
    """Read and check everything a checkpoint folder says about itself.

    Raises NotFoundError when `path` is no DCP folder (the hint names checkpoints inside it), DamagedError when it is
    incomplete or contradicts itself, UnsafeError when it wants to run code or to read outside its folder, and
    UnsupportedError when its bytes were transformed (compressed, encrypted) by an extension.
    """
    folder = place(path)
    manifest = parse_manifest(folder, read_provenance(folder))
    manifest.check_cover()
    check_sizes(manifest)
    return manifest


def parse_manifest(folder: Place, provenance: Provenance | None) -> Manifest:
    """What `.metadata` says, not yet held against itself and the files: `read_manifest` without its last two checks.

    Raises what `read_manifest` raises.
    """
    location = str(folder / METADATA_FILE)
    raw, sealed = unseal(_read_metadata_file(folder), location)
    with no_garbage_collection():
        manifest = _to_manifest(safe_pickle.load_flat(raw, stubs.METADATA_GLOBALS, location), folder, provenance)
    if is_ours(manifest.save_id) and not sealed:
        raise DamagedError(f"{location} was changed or cut short since it was written: its own checksum is gone")
    return manifest


def read_provenance(path: Place | str) -> Provenance | None:
    """The content of a checkpoint's `ckptool.json`; None when it has none. Raises DamagedError when it is malformed."""
    file = place(path) / PROVENANCE_FILE
    return Provenance.from_json(read_json(file), str(file)) if file.exists() else None


def is_checkpoint(path: Place) -> bool:
    """True for a folder with a `.metadata` file."""
    return (path / METADATA_FILE).is_file()


def checkpoints_inside(folder: Place, max_depth: int = 2) -> list[Place]:
    """The checkpoint folders below `folder`, sorted; hidden folders are not looked into."""
    found: list[Place] = []
    children: list[Place] = sorted(folder.iterdir()) if max_depth and folder.is_dir() else []
    for child in children:
        if child.is_dir() and not child.name.startswith("."):
            found += [child] if is_checkpoint(child) else checkpoints_inside(child, max_depth - 1)
    return found


def _read_metadata_file(folder: Place) -> bytes:
    file = folder / METADATA_FILE
    with os_errors(file):
        if file.is_file():
            num_bytes = file.stat().st_size
            if num_bytes > MAX_PICKLE_BYTES:
                raise DamagedError(f"{file} is larger than any real checkpoint's metadata")
            return read_bytes(file, num_bytes)
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


def _to_manifest(metadata: Any, folder: Place, provenance: Provenance | None) -> Manifest:
    location = str(folder / METADATA_FILE)
    try:
        return _read_records(metadata, folder, provenance, location)
    except ValueError as error:
        raise DamagedError(f"{location}: a damaged record: {error}") from error


def _read_records(metadata: Any, folder: Place, provenance: Provenance | None, location: str) -> Manifest:
    if type(metadata) is not stubs.Metadata or type(metadata.state_dict_metadata) is not list:
        raise DamagedError(f"{location} does not hold checkpoint metadata")
    places, files = _read_places(metadata.storage_data, folder, location)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for fqn, entry in pairs(metadata.state_dict_metadata):
        if type(fqn) is not str:
            raise DamagedError(f"{location}: an entry's name is not a string")
        if fqn in tensors or fqn in objects:
            raise DamagedError(f"{location}: two entries of the name {fqn}")
        if type(entry) is stubs.BytesStorageMetadata:
            objects[fqn] = ObjectEntry(fqn, _object_place(fqn, places.pop(fqn, []), location))
        elif type(entry) is stubs.TensorStorageMetadata:
            tensors[fqn] = _read_tensor(fqn, entry, places.pop(fqn, []), location)
        else:
            raise DamagedError(f"{location}: {fqn} is neither a tensor nor an object")
    if places:
        raise DamagedError(f"{location}: stored bytes for {next(iter(places))}, which is not among the entries")
    return Manifest(
        location=str(folder),
        tensors=tensors,
        objects=objects,
        paths=_read_paths(metadata.planner_data, location),
        ties=_find_ties(tensors, provenance),
        files=files,
        provenance=provenance,
        save_id=_read_save_id(metadata.storage_meta),
    )


def _read_save_id(storage_meta: Any) -> str:
    save_id = storage_meta.save_id if type(storage_meta) is stubs.StorageMeta else None
    return save_id if isinstance(save_id, str) else ""


def _read_places(storage_data: Any, folder: Place, location: str) -> tuple[dict[str, list[_Place]], dict[str, int]]:
    """By fqn, where its bytes lie; and the sizes in bytes of the files that exist."""
    if type(storage_data) is not list:
        raise DamagedError(f"{location} does not say where its bytes are")
    places: dict[str, list[_Place]] = defaultdict(list)
    files: dict[str, int] = {}
    for index, info in pairs(storage_data):
        if type(index) is not stubs.MetadataIndex or type(info) is not stubs.StorageInfo:
            raise DamagedError(f"{location}: damaged storage record {describe(index)}")
        fqn, file, offset, length = index.fqn, info.relative_path, info.offset, info.length
        if not (type(fqn) is type(file) is str and type(offset) is type(length) is int):
            raise DamagedError(f"{location}: damaged storage record of {describe(fqn)}")
        if info.transform_descriptors:
            transform = describe(info.transform_descriptors)
            raise UnsupportedError(f"{location}: {fqn} is stored transformed by {transform}")
        if file not in files:
            path = safe_join(folder, file)
            files[file] = path.stat().st_size if path.is_file() else -1
        places[fqn].append((index.offset, Locator(file, offset, length)))
    return places, {name: size for name, size in files.items() if size >= 0}


def _object_place(fqn: str, stored: list[_Place], location: str) -> Locator:
    if len(stored) != 1 or stored[0][0] is not None:
        raise DamagedError(f"{location}: it does not say where {fqn} is stored")
    return stored[0][1]


def _read_tensor(fqn: str, entry: stubs.TensorStorageMetadata, stored: list[_Place], location: str) -> TensorEntry:
    properties, shape, records = entry.properties, entry.size, entry.chunks
    dtype = properties.dtype if type(properties) is stubs.TensorProperties else ""
    if not dtype or type(records) is not list or not set(map(type, records)) <= {stubs.ChunkStorageMetadata}:
        raise DamagedError(f"{location}: tensor {fqn} lacks its dtype or its chunks")
    if dtype not in ITEMSIZE_BYTES:
        raise UnsupportedError(f"{location}: tensor {fqn} has the unknown dtype {dtype}")
    boxes = [Box(record.offsets, record.sizes) for record in records]
    if not _are_shapes([shape]) or not _are_shapes(corner for box in boxes for corner in (box.offsets, box.sizes)):
        raise DamagedError(f"{location}: tensor {fqn} has an impossible shape")
    if not is_possible_shape(shape):
        raise DamagedError(f"{location}: tensor {fqn} has an impossible shape: {list(shape)}")
    return TensorEntry(fqn, dtype, shape, _join(fqn, boxes, stored, location))


def _join(fqn: str, boxes: list[Box], stored: list[_Place], location: str) -> tuple[Chunk, ...]:
    """Each chunk with its place. Usually both come in one order."""
    if all(box.num_elements for box in boxes) and [place[0] for place in stored] == [box.offsets for box in boxes]:
        return tuple([Chunk(box, place[1]) for box, place in zip(boxes, stored, strict=True)])
    if not _are_shapes(offsets for offsets, _ in stored):
        raise DamagedError(f"{location}: damaged storage record of {fqn!r}")
    # Keyed by text: a tuple of integers can be chosen to have any hash, a string can't.
    locators = {str(offsets): locator for offsets, locator in stored}
    if len(locators) != len(stored):
        raise DamagedError(f"{location}: two places for the same chunk of {fqn}")
    # Ranks without rows leave empty chunks, which may share their offsets with each other or with a filled one.
    filled: dict[str, Locator] = {}
    for box in boxes:
        if box.num_elements:
            key = str(box.offsets)
            if key not in locators:
                raise DamagedError(
                    f"{location}: it does not say where the chunk at {list(box.offsets)} of {fqn} is stored"
                )
            filled[key] = locators.pop(key)
    chunks = [
        Chunk(box, filled[str(box.offsets)] if box.num_elements else locators.pop(str(box.offsets), None))
        for box in boxes
    ]
    if locators:
        raise DamagedError(f"{location}: stored bytes for {fqn} at {next(iter(locators))}, where it has no chunk")
    return tuple(chunks)


def _are_shapes(shapes: Iterable[Any]) -> bool:
    """True for tuples of integers from 0 up to what 64 bits hold, at most MAX_DIMS of them."""
    shapes = list(shapes)
    if not set(map(type, shapes)) <= {tuple} or max(map(len, shapes), default=0) > MAX_DIMS:
        return False
    numbers = itertools.chain.from_iterable
    return set(map(type, numbers(shapes))) <= {int} and all(
        0 <= extreme < 1 << 63 for extreme in (min(numbers(shapes), default=0), max(numbers(shapes), default=0))
    )


def _read_paths(planner_data: Any, location: str) -> dict[str, tuple[str | int, ...]]:
    if planner_data is None:
        return {}
    paths = list(pairs(planner_data)) if type(planner_data) is list else [(None, None)]
    for fqn, path in paths:
        if type(fqn) is not str or type(path) is not tuple or not set(map(type, path)) <= {str, int, bool}:
            raise DamagedError(f"{location}: damaged planner data")
    return dict(paths)


def _find_ties(tensors: Mapping[str, TensorEntry], provenance: Provenance | None) -> dict[str, str]:
    """alias -> canonical, for tensors whose chunks lie at the very same places."""
    aliases = {MODEL_PREFIX + name for name in provenance.ties} if provenance else set()
    # Whole entries are compared only where the first chunk lies at the same place.
    same_start: dict[str, list[str]] = {}
    for fqn, entry in tensors.items():
        if entry.num_elements:
            same_start.setdefault(str(entry.chunks[0].locator), []).append(fqn)
    groups: dict[tuple, list[str]] = {}
    for fqn in itertools.chain.from_iterable(names for names in same_start.values() if len(names) > 1):
        entry = tensors[fqn]
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
        itemsize = entry.itemsize_bytes
        for chunk in entry.chunks:
            num_bytes = chunk.box.num_elements * itemsize
            if chunk.locator is not None and num_bytes > chunk.locator.length:
                raise DamagedError(
                    f"{manifest.location}: a chunk of {fqn} needs {num_bytes} bytes, "
                    f"but {chunk.locator.length} are stored"
                )
    if manifest.num_bytes > sum(manifest.files.values()):
        raise DamagedError(
            f"{manifest.location}: the tensors claim {manifest.num_bytes} bytes, more than all data files hold"
        )
