"""safetensors headers: one validating reader, one writer.

A file is 8 bytes of little-endian header length, a JSON header, the payload:
https://github.com/huggingface/safetensors#format. The writer lays tensors out as the safetensors library does
(widest dtype first, then by name), so that a file it wrote comes back byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.tensors import Chunk, Locator, TensorEntry, is_possible_shape
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.storage.files import Place, RangeReader, os_errors

#: The library refuses longer headers, and so do we.
MAX_HEADER_BYTES = 100_000_000

#: safetensors name -> torch name, in the library's layout order (narrow to wide).
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_SAFETENSORS_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_LAYOUT_RANK = {torch_name: rank for rank, torch_name in enumerate(TORCH_NAMES.values())}


def read_header(reader: RangeReader, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of one file (locators hold absolute payload ranges) and its `__metadata__`.

    Raises DamagedError for anything the format forbids: ranges that overlap, leave holes or pass the end of the file,
    sizes that don't fit the shape, duplicate names. Raises UnsupportedError for dtypes torch can't hold.
    """
    path = reader.path_of(file)
    with os_errors(path):
        file_bytes = path.stat().st_size
    if file_bytes < 8:
        raise DamagedError(f"{path} is not a safetensors file: only {file_bytes} bytes long", kind="truncated")
    header_bytes = int.from_bytes(reader.read(file, 0, 8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise DamagedError(
            f"{path}: the header claims {header_bytes} bytes, the file has {file_bytes} (truncated?)", kind="truncated"
        )
    header = _parse_json(reader.read(file, 8, header_bytes), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{path}: __metadata__ is not a map of strings")
    start = 8 + header_bytes
    entries = {name: _entry(path, file, name, record, start) for name, record in header.items()}
    _check_ranges(path, entries, start, file_bytes)
    return entries, metadata


def _parse_json(raw: bytes, path: Place) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise DamagedError(f"{path}: a name appears twice in the header")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedError(f"{path}: the header is not a JSON object")
    return header


def _entry(path: Place, file: str, name: str, record: Any, start: int) -> TensorEntry:
    try:
        dtype_name, shape, (begin, end) = record["dtype"], record["shape"], record["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedError(f"{path}: tensor {name} has no dtype, shape or data_offsets") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) or end < begin or not is_possible_shape(shape):
        raise DamagedError(f"{path}: tensor {name} has an impossible shape or range")
    dtype = TORCH_NAMES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise UnsupportedError(f"{path}: tensor {name} has dtype {dtype_name!r}, which torch can't hold")
    num_bytes = math.prod(shape) * ITEMSIZE_BYTES[dtype]
    if num_bytes != end - begin:
        raise DamagedError(f"{path}: tensor {name} needs {num_bytes} bytes and has {end - begin}")
    box = Box.whole(shape)
    return TensorEntry(name, dtype, tuple(shape), (Chunk(box, Locator(file, start + begin, num_bytes)),))


def _check_ranges(path: Place, entries: Mapping[str, TensorEntry], start: int, file_bytes: int) -> None:
    ranges = sorted((e.chunks[0].locator.offset, e.num_bytes) for e in entries.values() if e.chunks[0].locator)
    position = start
    for offset, num_bytes in ranges:
        if offset != position:
            raise DamagedError(f"{path}: tensors overlap or leave a hole at byte {min(offset, position)}")
        position += num_bytes
    if position != file_bytes:
        raise DamagedError(
            f"{path}: the header describes {position} bytes, the file has {file_bytes} (truncated?)",
            kind="truncated" if file_bytes < position else "corrupt",
        )


def layout_order(entry: TensorEntry) -> tuple[int, str]:
    """Sort key of the library's layout: widest dtype first, then the name."""
    return (-_LAYOUT_RANK[entry.dtype], entry.fqn)


def build_header(entries: list[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """The bytes that precede the payload, and each tensor's absolute offset in the file; they lie in the order given.

    Raises UnsupportedError for a dtype that safetensors can't hold.
    """
    for entry in entries:
        if entry.dtype not in _SAFETENSORS_NAMES:
            raise UnsupportedError(f"safetensors can't hold tensor {entry.fqn} of dtype {entry.dtype}")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    offsets: dict[str, int] = {}
    for entry in entries:
        offsets[entry.fqn] = position
        header[entry.fqn] = {
            "dtype": _SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.num_bytes],
        }
        position += entry.num_bytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise UnsupportedError(f"a safetensors header of {len(raw)} bytes: use a smaller --max-shard-size")
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {fqn: start + offset for fqn, offset in offsets.items()}
