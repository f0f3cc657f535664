"""What a trainer's start takes until its first step is done, with and without what earlier starts have compiled.

    python benchmarks/gpu/startup.py --size 8b
    python benchmarks/gpu/startup.py --size tiny --device cpu

The model and its text are those of multi.py, on one rank, with `--compile` and bf16 weights. Each start is a process
that is killed after its second step, as a machine that is taken away. All have the same checkpoint to begin from, in
the page cache from the second start on. What is said of a start is what the trainer itself wrote to `startup.jsonl`.

* cold: nothing is compiled yet
* fresh machine, compile-cache: torch's own folders are empty, and the root has what the first start has compiled
* fresh machine: neither
* same machine: torch's own folders as the start before has left them, without the root's

Writes benchmarks/results/startup-{device}-{size}.md and .jsonl ("gpu" for cuda).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from multi import RESULTS, Host, prepare, read_lines
from random_model import SIZES

NUM_STEPS = 2
POLL_SECONDS = 0.05
PARTS = ("imports", "ranks", "origin", "data", "compile cache", "build", "load", "checks", "first step")


def start(host: Host, what: str, root: Path, own: Path, *flags: str) -> None:
    """A start of the trainer, and a row of it. `own` is the folder of torch's own caches."""
    left = host.deadline - time.monotonic()
    if left <= 0:
        host.note(what, "no time was left")
        return
    for name in ("metrics.jsonl", "startup.jsonl"):
        (root / name).unlink(missing_ok=True)
    options = host.options(root, 1000, save_every=0, keep_last=0, param_dtype="bf16", compute_dtype="bf16")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1" if host.is_cpu else "4",
        "TORCHINDUCTOR_CACHE_DIR": str(own),
        "TRITON_CACHE_DIR": str(own / "triton"),
    }
    command = [sys.executable, "-m", "trainer", *options, "--no-deterministic", "--compile", *flags]
    said = host.work / "said.txt"
    with said.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=host.work, env=environment, stderr=file, start_new_session=True
        )
    began = time.monotonic()
    metrics = root / "metrics.jsonl"
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < NUM_STEPS:
            if process.poll() is not None or time.monotonic() - began > left:
                host.note(what, "no second step in time", said=said.read_text()[-1500:])
                return
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    [found] = read_lines(root / "startup.jsonl")
    steps = read_lines(metrics)
    host.note(
        what,
        "start",
        total_seconds=found["total_seconds"],
        seconds=found["seconds"],
        graphs=found["graphs"],
        second_step_seconds=round(steps[1]["step_seconds"], 3),
        losses=[round(line["loss"], 6) for line in steps[:NUM_STEPS]],
        kept_megabytes=sum(file.stat().st_size for file in root.glob("compile-cache/*.bin")) / 1e6,
        notes=[line for line in said.read_text().splitlines() if line.startswith("note:")],
    )


def run_starts(host: Host) -> None:
    """All starts, the most important first."""
    root, own = host.work / "root", host.work / "torch"
    start(host, "cold", root, own, "--compile-cache")
    shutil.rmtree(own, ignore_errors=True)
    start(host, "fresh machine, compile-cache", root, own, "--compile-cache")
    shutil.rmtree(own, ignore_errors=True)
    start(host, "fresh machine", root, own)
    start(host, "same machine", root, own)


def write(host: Host, results: Path, seconds: float) -> None:
    """The raw rows, and a table of them."""
    import torch

    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"startup-{'cpu' if host.is_cpu else 'gpu'}-{host.size}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in host.rows))
    name = "CPU" if host.is_cpu else torch.cuda.get_device_name()
    lines = [
        f"1 x {name}, torch {torch.__version__}, Llama of size {host.size} in bf16, a sequence of {host.seq_len}, "
        f"{seconds:.0f} s in all",
        "",
        "Seconds from the start of the process to the end of its first step, and their parts.",
        "",
        f"| start | total | {' | '.join(PARTS)} | graphs compiled | from a cache | second step | losses |",
        f"|---|{'---|' * (len(PARTS) + 5)}",
    ]
    for row in host.rows:
        if "seconds" not in row or "graphs" not in row:
            continue
        parts = " | ".join(f"{row['seconds'].get(part, 0):.1f}" for part in PARTS)
        losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
        lines.append(
            f"| {row['section']} | {row['total_seconds']:.1f} | {parts} | {row['graphs']['compiled']} "
            f"| {row['graphs']['cached']} | {row['second_step_seconds']:.2f} | {losses} |"
        )
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--seconds", type=float, default=200, show_default=True, help="When they are over nothing is begun.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Folder for the table and the rows.")
def main(device: str, size: str, seconds: float, work: Path | None, results: Path) -> None:
    """Start the trainer several times and write what each start took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=work, prefix="startup-") as name:
        host = Host(Path(name), device, size, 1, began + seconds)
        try:
            prepare(host)
            run_starts(host)
        finally:
            write(host, results, time.monotonic() - began)


if __name__ == "__main__":
    main()
