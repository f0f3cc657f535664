"""How long the order of units takes: the next 512 units, and a resume, at several sizes. Prints a Markdown table.

Usage: python benchmarks/order.py
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from ckptool import DataPosition, DataSource

NUM_UNITS = 512
REPEATS = 50


def milliseconds(work: Callable[[], object]) -> float:
    """The quickest of many: this is arithmetic, which only other programs slow down."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1e3 * min(seconds)


def stream(*sizes: int) -> DataPosition:
    """As many sources as sizes, with equal weights."""
    sources = [DataSource(f"source-{number}", size) for number, size in enumerate(sizes)]
    weights = {source.name: 1.0 for source in sources}
    return DataPosition.begin(sources, seq_len=4096, seed=0, global_batch_size=NUM_UNITS, weights=weights)


def resumed(position: DataPosition) -> object:
    """What a resume does: read the record, compare the streams, find the next units."""
    fresh = DataPosition(position.segments, stream(1).stretches)
    record = DataPosition.from_json(position.to_json(), "record")
    there = fresh.at(record)
    return there.units(there.next_units())


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, best of {REPEATS}\n")
    print(f"| stream | units trained before | {NUM_UNITS} units, ms | resume, ms |")
    print("|---|---:|---:|---:|")
    cases = [("one source of 1e9", stream(10**9)), ("8 sources of 1e9", stream(*[10**9] * 8))]
    for name, position in cases:
        for num_steps in (0, 2 * 10**9):
            there = position.advance(num_steps)
            fetch = milliseconds(lambda there=there: there.units(there.next_units()))
            resume = milliseconds(lambda there=there: resumed(there))
            print(f"| {name} | {there.consumed:.0e} | {fetch:.2f} | {resume:.2f} |")


if __name__ == "__main__":
    main()
