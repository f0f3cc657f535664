"""The two orders of a head's rows that RoPE needs: it turns rows as pairs, of neighbours or of row i with i + d/2.

Source: transformers' convert_llama_weights_to_hf.py. Trailing dims stay as they are, so biases can be given too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Neighbours -> halves: in each head, the first rows of all pairs, then the second ones. Raises ValueError."""
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(num_heads, _half(rows, num_heads), 2, *rest).transpose(1, 2).reshape(rows, *rest)


def neighbours_together(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Halves -> neighbours, the inverse. Raises ValueError."""
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(num_heads, 2, _half(rows, num_heads), *rest).transpose(1, 2).reshape(rows, *rest)


def _half(rows: int, num_heads: int) -> int:
    if rows % (2 * num_heads):
        raise ValueError(f"{rows} rows are not those of {num_heads} heads")
    return rows // num_heads // 2
