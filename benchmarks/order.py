"""How long the order of units takes: the next 512 units, and a resume, at several sizes.

    python benchmarks/order.py

The peer is torch's DistributedSampler, whose permutation of an epoch is a list in memory that every resume makes anew.
Writes benchmarks/results/order.md.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from torch.utils.data import DistributedSampler

from ckptool import DataPosition, DataSource

RESULTS = Path(__file__).parent / "results"
NUM_UNITS = 512
PEER_SIZE = 10**7
REPEATS = 50
PEER_REPEATS = 3


def milliseconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The quickest of many: this is arithmetic, which only other programs slow down."""
    seconds = []
    for _ in range(repeats):
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


def peer_resumed() -> object:
    """512 indices from the middle of an epoch."""
    sampler = DistributedSampler(range(PEER_SIZE), num_replicas=1, rank=0, shuffle=True)
    return list(islice(iter(sampler), PEER_SIZE // 2, PEER_SIZE // 2 + NUM_UNITS))


def main() -> None:
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    lines = [
        f"{machine}, best of {REPEATS} ({PEER_REPEATS} of the peer)",
        "",
        f"| stream | units trained before | {NUM_UNITS} units, ms | resume, ms |",
        "|---|---:|---:|---:|",
    ]
    cases = [("one source of 1e9", stream(10**9)), ("8 sources of 1e9", stream(*[10**9] * 8))]
    for name, position in cases:
        for num_steps in (0, 2 * 10**9):
            there = position.advance(num_steps)
            fetch = milliseconds(lambda there=there: there.units(there.next_units()))
            resume = milliseconds(lambda there=there: resumed(there))
            lines.append(f"| {name} | {there.consumed:.0e} | {fetch:.2f} | {resume:.2f} |")
    peer = milliseconds(peer_resumed, PEER_REPEATS)
    lines.append(f"| DistributedSampler over {PEER_SIZE:.0e} | {PEER_SIZE // 2:.0e} | | {peer:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / "order.md").write_text(text)


if __name__ == "__main__":
    main()
