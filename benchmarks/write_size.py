"""How fast the kernel takes the same bytes in writes of several sizes: 1 GiB, then fsync.

    python benchmarks/write_size.py [FOLDER]

Writes benchmarks/results/write-size.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from measure import machine

TOTAL_BYTES = 1 << 30
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20)
ROUNDS = 5


def seconds_for(path: Path, data: memoryview, size: int) -> float:
    path.unlink(missing_ok=True)
    os.sync()
    start = time.monotonic()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    for offset in range(0, TOTAL_BYTES, size):
        begin = offset % len(data)
        os.pwrite(fd, data[begin : begin + size], offset)
    os.fsync(fd)
    os.close(fd)
    return time.monotonic() - start


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".", "write-size.tmp")
    data = memoryview(bytearray(os.urandom(1 << 20) * 32))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(ROUNDS):
        for size in SIZES:
            seconds[size].append(seconds_for(path, data, size))
    path.unlink()
    lines = [
        f"1 GiB by pwrite, then fsync, medians of {ROUNDS}; {machine()}",
        "",
        "| write size | seconds (min-max) |",
        "|---|---|",
    ]
    for size, runs in seconds.items():
        lines.append(f"| {size >> 10} KiB | {statistics.median(runs):.2f} ({min(runs):.2f}-{max(runs):.2f}) |")
    text = "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent / "results" / "write-size.md").write_text(text)


if __name__ == "__main__":
    main()
