"""One GGUF file (llama.cpp's format) as a Source of float32 tensors, dequantised by the `gguf` library.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised blocks lie inside rows, so any rows can be
made alone. Tensors keep their GGUF names (`blk.0.attn_q.weight`); `architecture` is the file's own word for the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import Chunk, TensorEntry, is_possible_shape
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from ckptool.storage.files import open_regular, os_errors

SUFFIX = ".gguf"

#: Elements dequantised at once: the library needs several times their size.
_STRIP_ELEMENTS = 1 << 20


def find_gguf(names: Collection[str], location: str) -> str | None:
    """The GGUF file among the files of the folder `location`; None when there is none. Raises UsageError for several,
    each of which may be the whole model."""
    found = sorted(name for name in names if name.endswith(SUFFIX))
    if len(found) > 1:
        raise UsageError(
            f"{location} has {len(found)} GGUF files: {', '.join(found)}",
            hint=f"name the one to import: {location}/{found[0]}",
        )
    return found[0] if found else None


class GgufSource:
    """Raises DamagedError for a file that is none or is cut short, UnsupportedError for tensors of a type that the
    library can't dequantise, or when the library is not there."""

    def __init__(self, path: Path) -> None:
        reader = _open(path)
        self._tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        self.architecture = _text(reader, "general.architecture", path)
        #: How its RoPE is scaled, in llama.cpp's words: "yarn", "linear"; "" when it does not say.
        self.rope_scaling = _text(reader, f"{self.architecture}.rope.scaling.type", path, "")
        _check_whole(reader, path)
        self.num_quantised = sum(tensor.tensor_type.name not in _PLAIN for tensor in reader.tensors)
        types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        #: The types of its tensors, for people: "F32, Q4_K, Q6_K".
        self.types = ", ".join(types)
        _check_types({tensor.tensor_type for tensor in reader.tensors}, path)
        entries = {name: _entry(name, tensor, path) for name, tensor in self._tensors.items()}
        self.manifest = Manifest(str(path), entries, files={path.name: path.stat().st_size}, whole_rows=True)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` with whole rows of a tensor, as float32."""
        import gguf
        import numpy

        tensor = self._tensors[fqn]
        shape = self.manifest.tensors[fqn].shape
        if box.sizes[1:] != shape[1:]:
            raise DamagedError(f"{self.manifest.location}: {fqn} can only be read in whole rows")
        made = numpy.frombuffer(out, dtype=numpy.float32).reshape(box.sizes)
        rows = max(1, _STRIP_ELEMENTS // max(1, math.prod(shape[1:])))
        for strip in box.split_rows(rows):
            first, end = strip.offsets[0], strip.ends[0]
            made[first - box.offsets[0] : end - box.offsets[0]] = gguf.dequantize(
                tensor.data[first:end], tensor.tensor_type
            )

    def ranges(self, fqn: str, box: Box) -> tuple[StoreRange, ...]:
        return ()

    def read_object(self, fqn: str) -> bytes:
        raise NotFoundError(f"{self.manifest.location}: a GGUF file holds no objects, so not {fqn}")

    def close(self) -> None:
        self._tensors = {}


_PLAIN = frozenset({"F32", "F16", "BF16"})


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: the gguf library is needed to read it", hint="pip install 'ckptool[gguf]'"
        ) from error
    with os_errors(path), open(open_regular(path), "rb") as file:
        if file.read(4) != b"GGUF":
            raise DamagedError(f"{path} is not a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the library checks little, so damage shows as nearly any error of numpy's
        detail = " ".join(str(error).split())[:200]
        raise DamagedError(f"{path}: not a whole GGUF file ({type(error).__name__}: {detail})") from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise UnsupportedError(f"{path}: stored on a big-endian machine")
    return reader


def _text(reader: Any, key: str, path: Path, default: str | None = None) -> str:
    """A text of the header. Raises DamagedError when it is no text, or absent and without a default."""
    field = reader.fields.get(key)
    value = field.contents() if field is not None else default
    if not isinstance(value, str):
        raise DamagedError(f"{path}: its header has no {key}")
    return value


def _check_whole(reader: Any, path: Path) -> None:
    """Raise UnsupportedError for one of the files that a large model is split into."""
    field = reader.fields.get("split.count")
    if field is not None and field.contents() not in (0, 1):
        raise UnsupportedError(
            f"{path} is one of {field.contents()} files of a model", hint="join them: llama-gguf-split --merge"
        )


def _check_types(types: set[Any], path: Path) -> None:
    import gguf
    import numpy

    for kind in sorted(types):
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(numpy.zeros((1, block_bytes), dtype=numpy.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedError(f"{path}: gguf can't dequantise tensors of type {kind.name}") from error


def _entry(name: str, tensor: Any, path: Path) -> TensorEntry:
    """The library gives the fastest-moving dim first."""
    shape = tuple(reversed([int(size) for size in tensor.shape]))
    if not shape or not is_possible_shape(shape):
        raise DamagedError(f"{path}: tensor {name} has an impossible shape")
    return TensorEntry(name, "float32", shape, (Chunk(Box.whole(shape)),))
