"""Saving and loading a training state: ckptool.save / ckptool.load next to stock dcp.save / dcp.load, in turns.

    python benchmarks/state.py [FOLDER]

One process, fp32 tensors of 32 MiB. Ours hashes every file, digests every tensor, flushes and renames while saving, and
compares all digests while loading; stock does none of that. Writes benchmarks/results/state.md and state.jsonl.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measure import Usage, machine, table, write_rows

import ckptool

RESULTS = Path(__file__).parent / "results"
NUM_TENSORS = 32
ROUNDS = 7


def main() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = {"model": {f"layer{i}.weight": torch.randn(1024, 8192) for i in range(NUM_TENSORS)}}
    blank = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None, prefix="state-") as name:
        folder = Path(name)
        provenance = ckptool.Provenance("benchmark")
        ours, stock = folder / "ours", folder / "stock"
        steps: dict[str, tuple[Path | None, Callable[[], object]]] = {
            "dcp.save": (stock, lambda: dcp.save(state, checkpoint_id=stock, no_dist=True)),
            "ckptool.save": (ours, lambda: ckptool.save(state, ours, provenance=provenance)),
            "dcp.load": (None, lambda: dcp.load(blank, checkpoint_id=ours, no_dist=True)),
            "ckptool.load": (None, lambda: ckptool.load(blank, ours)),
            "ckptool.load of a stock checkpoint (checksums)": (None, lambda: ckptool.load(blank, stock)),
        }
        rows: dict[str, list[Usage]] = {step: [] for step in steps}
        for number in range(ROUNDS + 1):
            for step, (target, run) in steps.items():
                if target is not None:
                    shutil.rmtree(target, ignore_errors=True)
                usage = measure(step, run)
                if number:
                    rows[step].append(usage)
    text = f"{NUM_TENSORS * 32 / 1024:g} GiB, {ROUNDS} rounds, one process; {machine()}\n\n"
    text += table({n: rows[n] for n in ("dcp.save", "ckptool.save")}, "dcp.save") + "\n\n"
    text += table({n: r for n, r in rows.items() if "load" in n}, "dcp.load") + "\n"
    print(text)
    write_rows(RESULTS / "state.jsonl", rows)
    (RESULTS / "state.md").write_text(text)


def measure(name: str, run: Callable[[], object]) -> Usage:
    """In this process: peak memory is not told apart, so it is given as 0."""
    wall, cpu = time.monotonic(), time.process_time()
    run()
    return Usage(name, time.monotonic() - wall, time.process_time() - cpu, 0)


if __name__ == "__main__":
    main()
