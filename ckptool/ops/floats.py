"""Bytes of a tensor's elements as numbers that torch can compute with, whatever their dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Complex numbers are looked at as pairs.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_PACKED = "float4_e2m1fn_x2"


def is_float(dtype: str) -> bool:
    """True for the dtypes that `as_floats` reads: all but integers, booleans and packed float4."""
    return dtype != _PACKED and dtype.startswith(("float", "bfloat", "complex"))


def as_floats(data: memoryview, dtype: str) -> Tensor:
    """Flat float tensor over the bytes; float8 comes widened to float32, complex numbers as pairs of parts."""
    import torch

    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, _PARTS.get(dtype, dtype)))
    return flat.float() if dtype.startswith("float8") else flat


def count_not_finite(data: memoryview, dtype: str) -> tuple[int, int]:
    """NaN and infinite elements among those whose bytes `data` holds. Integers have none."""
    import torch

    if not is_float(dtype) or not data:
        return 0, 0
    floats = as_floats(data, dtype)
    # aminmax passes NaN on, and is many times faster than isfinite on the usual tensor, which is all finite.
    if all(bool(torch.isfinite(bound)) for bound in torch.aminmax(floats)):
        return 0, 0
    return int(torch.isnan(floats).sum()), int(torch.isinf(floats).sum())
