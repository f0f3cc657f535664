"""A Source that gives the weights of a quantised one: each is made, rows at a time, when it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box
from ckptool.core.interfaces import Source
from ckptool.core.quantisation import Found
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError, MismatchError, UnsupportedError
from ckptool.formats.fp8 import find_scaled
from ckptool.formats.mxfp4 import find_packed

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_BYTES = 64 << 20


class DequantisedSource:
    """`source` with `found.recipes` in place of what they are made of; the weights are of `dtype`."""

    def __init__(self, source: Source, found: Found, dtype: str) -> None:
        self._source = source
        self._recipes = found.recipes
        self._kept: tuple[str, Tensor] | None = None
        used = {name for recipe in found.recipes.values() for name in recipe.sources} | set(found.dropped)
        tensors = {name: entry for name, entry in source.manifest.tensors.items() if name not in used}
        for name, recipe in found.recipes.items():
            tensors[name] = TensorEntry(name, dtype, recipe.shape, (Chunk(Box.whole(recipe.shape)),))
        self.manifest = dataclasses.replace(source.manifest, tensors=tensors)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` with rows of a tensor. Raises MismatchError for a weight that its dtype can't hold."""
        recipe = self._recipes.get(fqn)
        if recipe is None:
            self._source.read_into(fqn, box, out)
            return
        entry = self.manifest.tensors[fqn]
        if box.sizes[1:] != entry.shape[1:]:
            raise DamagedError(f"{self.manifest.location}: {fqn} can only be read in whole rows")
        if not out:
            return
        import torch

        made = torch.frombuffer(out, dtype=getattr(torch, entry.dtype)).view(box.sizes)
        recipe.fill(self._read, box, made)
        if entry.dtype == "float16" and bool(made.isinf().any()):
            raise MismatchError(f"{fqn}: values are too large for float16", hint="--dtype bf16 has the range of fp32")

    def read_object(self, fqn: str) -> bytes:
        return self._source.read_object(fqn)

    def close(self) -> None:
        self._source.close()

    def _read(self, fqn: str, box: Box) -> Tensor:
        """Part of a stored tensor. A whole one (scales) is kept for the next rows, which need it again."""
        import torch

        entry = self._source.manifest.tensors[fqn]
        if self._kept is not None and self._kept[0] == fqn and box.sizes == entry.shape:
            return self._kept[1]
        data = bytearray(box.num_elements * entry.itemsize_bytes)
        if not data:
            return torch.empty(box.sizes, dtype=getattr(torch, entry.dtype))
        self._source.read_into(fqn, box, memoryview(data))
        part = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).view(box.sizes)
        if box.sizes == entry.shape and len(data) <= _KEPT_BYTES:
            self._kept = (fqn, part)
        return part


def find_quantised(tensors: Mapping[str, TensorEntry], quantisation: Any, location: str) -> Found:
    """What a config's `quantization_config` says of the tensors.

    Raises UnsupportedError, which names the method, for one that is not understood.
    """
    method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
    find = _METHODS.get(method) if isinstance(method, str) else None
    if find is None:
        raise UnsupportedError(
            f"{location}: weights quantised with {str(method)[:100]!r} are not understood",
            hint="use the model's unquantised checkpoint",
        )
    return find(tensors, quantisation)


def _find_fp8(tensors: Mapping[str, TensorEntry], quantisation: Mapping[str, Any]) -> Found:
    return find_scaled(tensors, _block_size(quantisation.get("weight_block_size")))


def _find_compressed(tensors: Mapping[str, TensorEntry], quantisation: Mapping[str, Any]) -> Found:
    """compressed-tensors, where it means 8-bit floats with a scale a tensor, a row or a block.

    https://github.com/vllm-project/compressed-tensors: config fields, `float-quantized`.
    """
    groups = quantisation.get("config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    known = [w for w in weights if isinstance(w, dict) and (w.get("num_bits"), w.get("type")) == (8, "float")]
    others = [key for key in ("sparsity_config", "transform_config") if quantisation.get(key)]
    if not weights or len(known) != len(weights) or quantisation.get("format") != "float-quantized" or others:
        named = others[0] if others else quantisation.get("format")
        raise UnsupportedError(
            f"weights quantised with 'compressed-tensors' as {str(named)[:100]!r} are not understood",
            hint="use the model's unquantised checkpoint",
        )
    sizes = {_block_size(weight.get("block_structure")) for weight in known}
    if len(sizes) != 1:
        raise UnsupportedError("weights quantised with 'compressed-tensors' in blocks of several sizes")
    return find_scaled(tensors, sizes.pop())


def _find_mxfp4(tensors: Mapping[str, TensorEntry], quantisation: Mapping[str, Any]) -> Found:
    return find_packed(tensors)


_METHODS: dict[str, Callable[[Mapping[str, TensorEntry], Mapping[str, Any]], Found]] = {
    "fp8": _find_fp8,
    "compressed-tensors": _find_compressed,
    "mxfp4": _find_mxfp4,
}


def _block_size(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None when the config names none. Raises UnsupportedError for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise UnsupportedError(f"a quantisation in blocks of {str(value)[:100]} is not understood")
    return (value[0], value[1])
