"""How far two tensors of one shape are apart, a few row blocks in memory at a time, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.core.interfaces import Progress, Source
from ckptool.ops.floats import as_floats, count_not_finite, is_float
from ckptool.ops.pairs import read_pairs, same_bytes

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_PACKED = "float4_e2m1fn_x2"


@dataclass(frozen=True)
class TensorDiff:
    """One tensor on both sides. `equal`: every element equal, NaN taken as equal to NaN, and the dtypes too.

    `max_abs` is the largest |a - b|, `relative` that over the largest |a|, `cosine` of the flattened tensors; None
    where infinite or undefined. Elements that are NaN on one side count as different, and are left out of these three.
    """

    fqn: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    num_elements: int
    num_different: int = 0
    num_nan_both: int = 0
    num_nan_one: int = 0
    max_abs: float | int | None = 0.0
    relative: float | None = 0.0
    cosine: float | None = 1.0

    @property
    def equal(self) -> bool:
        return self.num_different == 0 and self.dtypes[0] == self.dtypes[1]

    @property
    def size(self) -> float:
        """What differences are ordered by: the relative one; infinite where that is undefined."""
        return (math.inf if self.num_different else 0.0) if self.relative is None else self.relative

    def to_json(self) -> dict[str, Any]:
        return {
            "fqn": self.fqn,
            "equal": self.equal,
            "dtype": list(dict.fromkeys(self.dtypes)),
            "shape": list(self.shape),
            "num_elements": self.num_elements,
            "num_different": self.num_different,
            "num_nan_both": self.num_nan_both,
            "num_nan_one": self.num_nan_one,
            "max_abs": self.max_abs,
            "relative": self.relative,
            "cosine": self.cosine,
        }


def diff_tensor(one: Source, other: Source, fqn: str, report: Progress | None = None) -> TensorDiff:
    """Compare a tensor that both have in the same shape. `report` counts the bytes of `one`."""
    entry, counterpart = one.manifest.tensors[fqn], other.manifest.tensors[fqn]
    dtypes = (entry.dtype, counterpart.dtype)
    if dtypes[0].startswith("complex") != dtypes[1].startswith("complex"):
        # Nothing to subtract: an imaginary part has no counterpart.
        return TensorDiff(
            fqn, dtypes, entry.shape, entry.num_elements, entry.num_elements, max_abs=None, relative=None, cosine=None
        )
    sums = _Sums()
    if dtypes[0] != dtypes[1] or not _all_same(one, other, fqn, sums):
        sums = _Sums()
        add = _adder(*dtypes)
        for _, here, there in read_pairs(one, other, fqn):
            add(sums, here, there)
        numbers = {"max_abs": _finite(sums.max_abs), "relative": sums.relative(), "cosine": sums.cosine()}
    else:
        numbers = {}
    if report:
        report(entry.num_bytes)
    counts = (sums.num_different, sums.num_nan_both, sums.num_nan_one)
    return TensorDiff(fqn, dtypes, entry.shape, entry.num_elements, *counts, **numbers)  # type: ignore[arg-type]


@dataclass
class _Sums:
    """What the blocks add up to; NaN elements are only counted."""

    num_different: int = 0
    num_nan_both: int = 0
    num_nan_one: int = 0
    max_abs: float | int = 0.0
    max_one: float = 0.0
    dot: float = 0.0
    square_one: float = 0.0
    square_other: float = 0.0

    def relative(self) -> float | None:
        if self.max_abs == 0:
            return 0.0
        return _finite(self.max_abs / self.max_one) if self.max_one else None

    def cosine(self) -> float | None:
        if self.square_one == 0 and self.square_other == 0:
            return 1.0
        lengths = math.sqrt(self.square_one) * math.sqrt(self.square_other)
        # Rounding may carry the quotient a little past one.
        cosine = _finite(self.dot / lengths) if lengths else 0.0
        return cosine if cosine is None else max(-1.0, min(1.0, cosine))


def _finite(number: float | int) -> float | int | None:
    return number if math.isfinite(number) else None


def _all_same(one: Source, other: Source, fqn: str, sums: _Sums) -> bool:
    """True when all bytes are the same: nothing but NaN needs to be counted then."""
    dtype = one.manifest.tensors[fqn].dtype
    for _, here, there in read_pairs(one, other, fqn):
        if not same_bytes(here, there):
            return False
        sums.num_nan_both += count_not_finite(here, dtype)[0]
    return True


def _adder(dtype: str, other_dtype: str) -> Callable[[_Sums, memoryview, memoryview], None]:
    """How to add two blocks of these dtypes: integers of one kind exactly, everything else as float64."""
    if dtype == other_dtype and not is_float(dtype):
        return lambda sums, here, there: _add_integers(sums, _as_integers(here, dtype), _as_integers(there, dtype))
    return lambda sums, here, there: _add_floats(sums, _as_float64(here, dtype), _as_float64(there, other_dtype))


def _as_integers(data: memoryview, dtype: str) -> np.ndarray:
    """Booleans come as 0 and 1; of packed float4 the bytes are compared."""
    import numpy as np

    return np.frombuffer(data, np.uint8 if dtype in ("bool", _PACKED) else np.dtype(dtype))


def _as_float64(data: memoryview, dtype: str) -> Tensor:
    import torch

    if is_float(dtype):
        return as_floats(data, dtype).double()
    return torch.from_numpy(_as_integers(data, dtype).astype("float64"))


def _add_integers(sums: _Sums, one: np.ndarray, other: np.ndarray) -> None:
    import numpy as np

    unsigned = np.dtype(f"u{one.dtype.itemsize}")
    # The larger minus the smaller fits into the unsigned type, whatever the signed subtraction wraps around to.
    distance = (np.maximum(one, other) - np.minimum(one, other)).view(unsigned)
    sums.num_different += int(np.count_nonzero(distance))
    sums.max_abs = max(int(sums.max_abs), int(distance.max()))
    _add_products(sums, one.astype(np.float64), other.astype(np.float64))


def _add_floats(sums: _Sums, one: Tensor, other: Tensor) -> None:
    import torch

    nan_one, nan_other = torch.isnan(one), torch.isnan(other)
    num_nan_both = int((nan_one & nan_other).sum())
    num_nan_one = int((nan_one ^ nan_other).sum())
    if num_nan_both or num_nan_one:
        valid = ~(nan_one | nan_other)
        one, other = one[valid], other[valid]
    sums.num_nan_both += num_nan_both
    sums.num_nan_one += num_nan_one
    distance = (one - other).abs_().masked_fill_(one == other, 0.0)  # infinity minus itself is NaN
    sums.num_different += int(torch.count_nonzero(distance)) + num_nan_one
    if one.numel():
        sums.max_abs = max(sums.max_abs, float(distance.max()))
        _add_products(sums, one.numpy(), other.numpy())


def _add_products(sums: _Sums, one: np.ndarray, other: np.ndarray) -> None:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # infinite sums are reported as undefined
        sums.max_one = max(sums.max_one, float(np.abs(one).max()))
        sums.dot += float(np.dot(one, other))
        sums.square_one += float(np.dot(one, one))
        sums.square_other += float(np.dot(other, other))
