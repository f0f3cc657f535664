"""The scaling of RoPE that a GGUF file of Llama 3.1 or later stores as a tensor, as the config that transformers needs.

llama.cpp writes one divisor for each frequency (`rope_freqs.weight`); transformers computes them from four numbers
(modeling_rope_utils.py, `llama3`). Three of those are the same in all of Meta's releases; the fourth, the factor, is
the largest divisor. What they give is compared with what is stored, so nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: The tensor's name.
ROPE_FREQS = "rope_freqs.weight"

_LOW, _HIGH, _ORIGINAL_LENGTH = 1.0, 4.0, 8192
_TOLERANCE = 1e-4
_MAX_FACTOR = 1e6


def llama3_rope(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """`rope_parameters` of a config whose frequencies are divided by these; None when no such config gives them."""
    factor = round(max(divisors, default=0.0), 3)
    expected = [_divisor(theta ** (-i / len(divisors)), factor) for i in range(len(divisors))]
    close = [math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(divisors, expected, strict=True)]
    if not 1 < factor < _MAX_FACTOR or not all(close):
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    }


def _divisor(frequency: float, factor: float) -> float:
    """By what Llama 3.1 divides a frequency: short waves by 1, long ones by the factor, others by something between."""
    length = 2 * math.pi / frequency
    if length < _ORIGINAL_LENGTH / _HIGH:
        return 1.0
    if length > _ORIGINAL_LENGTH / _LOW:
        return factor
    smooth = (_ORIGINAL_LENGTH / length - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)
