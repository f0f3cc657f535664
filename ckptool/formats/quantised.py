"""Which quantised forms are understood: from a config's `quantization_config` to recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptool.core.recipes import Found
from ckptool.core.tensors import TensorEntry
from ckptool.errors import UnsupportedError
from ckptool.formats.fp8 import find_scaled
from ckptool.formats.mxfp4 import find_packed


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
