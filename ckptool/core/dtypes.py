"""Dtype names as torch spells them (`bfloat16`), their sizes, and which of them a cast may touch. No torch here."""

from __future__ import annotations

ITEMSIZE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

#: The dtypes that a `--dtype` cast converts. Integers, booleans, complex numbers and packed or scaled formats
#: (float8, float4) keep theirs: casting them without their scales would give wrong weights.
CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})

#: What people type for `--dtype`, and the torch name for it.
DTYPE_OPTIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
