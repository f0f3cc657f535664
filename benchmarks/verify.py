"""`ckptool verify` next to reading alone (`cat`) and to what people use (`sha256sum`): same files, same run, in turns.

    python benchmarks/verify.py --gigabytes 1.5 --rounds 5

"cold" rows start with the files dropped from the page cache. Writes benchmarks/results/verify.md and the raw rows.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click
from measure import Usage, in_turns, machine, write_rows

RESULTS = Path(__file__).parent / "results"
COLD = ", cold"

#: What `b3sum --num-threads 1` does, by the library that ckptool uses.
HASH_ALONE = """
import sys
from blake3 import blake3
for name in sys.argv[1:]:
    hasher, buffer = blake3(), bytearray(256 << 10)
    with open(name, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
"""


def make_checkpoints(folder: Path, num_bytes: int) -> None:
    """`ours` (with digests) and `foreign` (torch's own, checksums only), of random bf16 tensors of 64 MB."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    num_tensors = max(1, num_bytes // (64 << 20))
    tensors = {f"layers.{i}.w": torch.randn(16384, 2048).bfloat16() for i in range(num_tensors)}
    dcp.save({"model": tensors}, checkpoint_id=folder / "foreign", no_dist=True)
    save_file(tensors, folder / "model.safetensors")
    command = [sys.executable, "-m", "ckptool", "import-hf", "-q", folder / "model.safetensors", folder / "ours"]
    subprocess.run(command, check=True)


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def drop_from_cache(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def table(rows: Mapping[str, list[Usage]], num_bytes: int) -> str:
    """A Markdown table of medians. The interpreter's start is in ours, as it is for the person who waits."""
    lines = ["| | wall s (median, min-max) | GB/s | CPU s | GB per CPU second |", "|---|---|---|---|---|"]
    for name, runs in rows.items():
        walls = [usage.wall_seconds for usage in runs]
        wall, cpu = statistics.median(walls), statistics.median(usage.cpu_seconds for usage in runs)
        lines.append(
            f"| {name} | {wall:.2f} ({min(walls):.2f}-{max(walls):.2f}) | {num_bytes / wall / 1e9:.2f} "
            f"| {cpu:.2f} | {num_bytes / cpu / 1e9:.2f} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--gigabytes", default=1.5, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
@click.option("--note", default="", help="A sentence about the machine for the page.")
def main(gigabytes: float, rounds: int, work: Path | None, note: str) -> None:
    with tempfile.TemporaryDirectory(dir=work, prefix="verify-") as name:
        folder = Path(name)
        make_checkpoints(folder, int(gigabytes * 1e9))
        ours, foreign = folder / "ours", folder / "foreign"
        files = data_files(ours)
        num_bytes = sum(file.stat().st_size for file in files)
        verify = [sys.executable, "-m", "ckptool", "verify", "-q"]
        read_all = ["sh", "-c", f"cat {' '.join(map(str, files))} > /dev/null"]
        commands = {
            "cat > /dev/null": read_all,
            "sha256sum": ["sha256sum", *map(str, files)],
            "BLAKE3 alone, one thread": [sys.executable, "-c", HASH_ALONE, *map(str, files)],
            "verify (bytes: BLAKE3)": [*verify, str(ours)],
            "verify a foreign checkpoint (bytes: CRC-32)": [*verify, str(foreign)],
            "verify --level content": [*verify, str(ours), "--level", "content"],
            "verify --level structure": [*verify, str(ours), "--level", "structure"],
            f"cat > /dev/null{COLD}": read_all,
            f"verify (bytes: BLAKE3){COLD}": [*verify, str(ours)],
        }

        def before(name: str) -> None:
            if name.endswith(COLD):
                drop_from_cache(files)

        rows = in_turns(commands, rounds, before)
    text = f"{num_bytes / 1e9:.1f} GB, {rounds} rounds, {machine()}. {note}".rstrip()
    text += f"\n\n{table(rows, num_bytes)}\n"
    print(text)
    write_rows(RESULTS / "verify.jsonl", rows)
    (RESULTS / "verify.md").write_text(text)


if __name__ == "__main__":
    main()
