"""What the numbers of a checkpoint look like: norm, largest, NaN and a histogram of magnitudes, per tensor and layer.

One pass, a block in memory at a time. The histogram counts elements by the power of two that their magnitude lies in,
so that the counts of blocks, tensors and layers simply add up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptool.core.interfaces import Progress, Source
from ckptool.ops.blocks import in_threads, num_workers, read_blocks
from ckptool.ops.diff import layer_of
from ckptool.ops.floats import as_floats, is_float

#: Bin `i` counts magnitudes in [2**(LOWEST_EXPONENT + i), 2**(LOWEST_EXPONENT + i + 1)); the outer bins take the rest.
LOWEST_EXPONENT = -40
NUM_BINS = 60


@dataclass(frozen=True)
class ValueStatistics:
    """Of the finite elements of a tensor or layer; `histogram` has NUM_BINS counts, zeros are counted apart."""

    name: str
    num_elements: int = 0
    square_sum: float = 0.0
    max_abs: float = 0.0
    num_zero: int = 0
    num_nan: int = 0
    num_inf: int = 0
    histogram: tuple[int, ...] = (0,) * NUM_BINS

    @property
    def norm(self) -> float:
        """The root of the sum of squares; infinite where that is beyond float64."""
        return math.sqrt(self.square_sum)

    @property
    def root_mean_square(self) -> float:
        num_finite = self.num_elements - self.num_nan - self.num_inf
        return math.sqrt(self.square_sum / num_finite) if num_finite else 0.0

    def plus(self, other: ValueStatistics) -> ValueStatistics:
        return ValueStatistics(
            self.name,
            self.num_elements + other.num_elements,
            self.square_sum + other.square_sum,
            max(self.max_abs, other.max_abs),
            self.num_zero + other.num_zero,
            self.num_nan + other.num_nan,
            self.num_inf + other.num_inf,
            tuple(map(sum, zip(self.histogram, other.histogram, strict=True))),
        )


def tensor_statistics(
    open_source: Callable[[], Source], fqns: Sequence[str], report: Progress | None = None
) -> list[ValueStatistics]:
    """Read the tensors `fqns`, which must hold floating-point numbers, spread over threads with a source each.

    Raises DamagedError when stored bytes can't be read.
    """
    workers = min(num_workers(), len(fqns))

    def work(share: Sequence[str]) -> list[ValueStatistics]:
        with contextlib.closing(open_source()) as source:
            return [_of_tensor(source, fqn, report) for fqn in share]

    shares = [fqns[start::workers] for start in range(workers)]
    found = {one.name: one for share in in_threads(work, shares, workers) for one in share}
    return [found[fqn] for fqn in fqns]


def by_layer(tensors: Sequence[ValueStatistics]) -> list[ValueStatistics]:
    """Sums per layer (`model.layers.3`), in the order in which the layers first appear."""
    layers: dict[str, ValueStatistics] = {}
    for tensor in tensors:
        layer = layer_of(tensor.name)
        layers[layer] = layers.get(layer, ValueStatistics(layer)).plus(tensor)
    return list(layers.values())


def has_statistics(dtype: str) -> bool:
    return is_float(dtype)


def _of_tensor(source: Source, fqn: str, report: Progress | None) -> ValueStatistics:
    entry = source.manifest.tensors[fqn]
    total = ValueStatistics(fqn)
    for _, data in read_blocks(source, entry):
        total = total.plus(of_block(data, entry.dtype, fqn))
        if report:
            report(len(data))
    return total


def of_block(data: memoryview, dtype: str, name: str = "") -> ValueStatistics:
    """The statistics of the elements whose bytes `data` holds; complex numbers count as two."""
    import torch

    if not data:
        return ValueStatistics(name)
    floats = as_floats(data, dtype)
    magnitudes = (floats if floats.dtype == torch.float64 else floats.float()).abs()
    num_elements = magnitudes.numel()
    num_nan, num_inf = int(torch.isnan(magnitudes).sum()), int(torch.isinf(magnitudes).sum())
    if num_nan or num_inf:
        magnitudes = magnitudes[torch.isfinite(magnitudes)]
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    num_zero = num_elements - num_nan - num_inf - int(torch.count_nonzero(magnitudes))
    if magnitudes.numel():
        # frexp gives x = m * 2**e with 0.5 <= m < 1, so 2**(e-1) <= x < 2**e.
        bins = torch.frexp(magnitudes).exponent.long().sub_(1 + LOWEST_EXPONENT).clamp_(0, NUM_BINS - 1)
        counts += torch.bincount(bins[magnitudes > 0] if num_zero else bins, minlength=NUM_BINS)
    wide = magnitudes.double()
    return ValueStatistics(
        name,
        num_elements,
        float(torch.dot(wide, wide)),
        float(magnitudes.max()) if magnitudes.numel() else 0.0,
        num_zero,
        num_nan,
        num_inf,
        tuple(counts.tolist()),
    )
