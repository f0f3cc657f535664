"""A cast that would make an infinity of a number is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptool.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor, dtype


def check_overflow(fqn: str, before: Tensor, after: Tensor, hint: str = "--dtype bf16 has the range of fp32") -> None:
    """Raise MismatchError when a cast of the tensor `fqn` made an infinity of a number."""
    import torch

    if (
        after.dtype == before.dtype
        or not (after.is_floating_point() and after.numel())
        or _holds_all_of(after.dtype, before.dtype)
    ):
        return
    if after.itemsize > 1 and all(math.isfinite(extreme) for extreme in torch.aminmax(after)):
        return  # which takes a fortieth of the time of counting
    num_lost = int(after.isinf().sum()) - int(before.isinf().sum())
    if num_lost:
        raise MismatchError(
            f"{fqn}: {num_lost} values are too large for {str(after.dtype).removeprefix('torch.')}",
            hint=hint,
        )


def _holds_all_of(wide: dtype, narrow: dtype) -> bool:
    """True when no finite number of `narrow` is too large for `wide`."""
    import torch

    return narrow.is_floating_point and torch.finfo(wide).max >= torch.finfo(narrow).max
