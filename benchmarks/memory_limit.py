"""Conversions in a process that may not have more memory than a tenth of the model, page cache included.

    python benchmarks/memory_limit.py --gigabytes 6 --divisor 10      (as root: it makes a control group)

The limit is the kernel's (memory.limit_in_bytes, memory.max), so a conversion that needs more is killed. Two peers run
under the same limit. Writes benchmarks/results/memory-limit-{gigabytes}gb.jsonl and .md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from convert import PEERS
from measure import machine

RESULTS = Path(__file__).parent / "results"
CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A group whose processes together get `limit_bytes`, no swap; version 1 or 2 of the kernel's interface."""
    version_1 = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    group = (CGROUPS / "memory" if version_1 else CGROUPS) / f"ckptool-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit_bytes))
        yield group
    finally:
        time.sleep(0.5)  # the last process may still be leaving
        group.rmdir()


def run_inside(group: Path, command: Sequence[str]) -> tuple[int, float, str]:
    """Exit status (negative: the signal), wall seconds and the last line of output."""
    start = time.monotonic()
    join = f"echo $$ > {group}/cgroup.procs && exec "
    done = subprocess.run(["sh", "-c", join + " ".join(map(str, command))], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, time.monotonic() - start, lines[-1][:200] if lines else ""


@click.command()
@click.option("--gigabytes", default=6.0, show_default=True)
@click.option("--divisor", default=10, show_default=True, help="The limit is the model's size divided by this.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
def main(gigabytes: float, divisor: int, work: Path | None) -> None:
    limit_bytes = int(gigabytes * 1e9) // divisor
    rows = []
    with tempfile.TemporaryDirectory(dir=work, prefix="memory-limit-") as name:
        folder = Path(name)
        script = Path(__file__).with_name("convert.py")
        subprocess.run([sys.executable, script, "make", str(folder / "hf"), str(gigabytes)], check=True)
        ours = [sys.executable, "-m", "ckptool"]
        commands = {
            "ckptool import-hf": [*ours, "import-hf", "-q", folder / "hf", folder / "dcp"],
            "ckptool export": [*ours, "export", "-q", folder / "dcp", "--out", folder / "out"],
            **{
                peer: [sys.executable, script, "peer", f"'{peer}'", folder / source, folder / "out"]
                for peer, source in (
                    ("from_pretrained + dcp.save", "hf"),
                    ("dcp_to_torch_save + safetensors", "dcp"),
                )
                if peer in PEERS
            },
        }
        for command_name, command in commands.items():
            shutil.rmtree(folder / "out", ignore_errors=True)
            with control_group(limit_bytes) as group:
                status, seconds, said = run_inside(group, [str(word) for word in command])
            row = {
                "name": command_name,
                "limit_bytes": limit_bytes,
                "status": status,
                "wall_seconds": seconds,
                "said": said,
            }
            rows.append(row)
            print(row, file=sys.stderr)
    lines = ["| | exit status | wall s |", "|---|---|---|"]
    lines += [f"| {r['name']} | {r['status']} | {r['wall_seconds']:.1f} |" for r in rows]
    text = f"{gigabytes:g} GB model, limit {limit_bytes / 1e6:.0f} MB, {machine()}\n\n" + "\n".join(lines) + "\n"
    print(text)
    stem = f"memory-limit-{gigabytes:g}gb"
    (RESULTS / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RESULTS / f"{stem}.md").write_text(text)


if __name__ == "__main__":
    main()
