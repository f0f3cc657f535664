"""Loading on several ranks: torch's `dcp.load` with its own reader and with ckptool.StorageReader.

    python benchmarks/read.py --gigabytes 3 --ranks 2,3,4,5,6,7,8,16

Two checkpoints of the same tensors: an import (rows cut by core/cuts.py) and one whose tensors are stored whole, as one
process with `dcp.save` writes them. The ranks are processes on this machine, over gloo; the tensors are split as FSDP2
splits them. Counted: bytes read by all ranks together, in multiples of the model. Measured: CPU seconds of all ranks
for `dcp.load` alone (without their start), medians over the rounds. A sum over all elements must come out the same from
all loads. Writes benchmarks/results/read.md and read.jsonl.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from measure import machine

RESULTS = Path(__file__).parent / "results"
READERS = ("stock", "ours")

RANK = """
import json, os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import ckptool
from ckptool.storage.files import RangeReader

folder, reader_name, shapes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
counted = [0]

class CountingReader(dcp.FileSystemReader):
    def read_data(self, plan, planner):
        counted[0] += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)

def count(self, name, offset_bytes, out):
    counted[0] += len(out)
    read_into(self, name, offset_bytes, out)

read_into, RangeReader.read_into = RangeReader.read_into, count
state = {
    name: distribute_tensor(torch.empty(shape, dtype=torch.bfloat16), mesh, [Shard(0)], src_data_rank=None)
    for name, shape in shapes.items()
}
opened = {"stock": CountingReader, "ours": ckptool.StorageReader}[reader_name]  # imports are part of the start
dist.barrier()
wall, cpu = time.monotonic(), time.process_time()
dcp.load({"model": state}, storage_reader=opened(folder))
wall, cpu = time.monotonic() - wall, time.process_time() - cpu
bits = torch.zeros(1, dtype=torch.int64)
for name, tensor in state.items():
    local = tensor.to_local()
    if local.numel():
        bits += local.contiguous().view(torch.int16).to(torch.int64).sum()
totals = torch.tensor([counted[0], cpu, bits.item()], dtype=torch.float64)
dist.all_reduce(totals)
if dist.get_rank() == 0:
    print("RESULT", json.dumps({"num_bytes": totals[0].item(), "cpu_seconds": totals[1].item(),
                                "wall_seconds": wall, "sum": totals[2].item()}))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # some of gloo's threads may still run, which ends a process that leaves the usual way with SIGABRT
"""


def llama_shapes(num_bytes: int) -> dict[str, list[int]]:
    """A Llama-shaped model of about this size in bf16; its dims are not multiples of all world sizes."""
    hidden, inner, vocab = 2048, 5504, 32003
    layer = {
        **{f"self_attn.{kind}_proj.weight": [hidden, hidden] for kind in "qkvo"},
        **{f"mlp.{kind}_proj.weight": [inner, hidden] for kind in ("gate", "up")},
        "mlp.down_proj.weight": [hidden, inner],
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
    }
    layer_bytes = 2 * sum(rows * (rest[0] if rest else 1) for rows, *rest in layer.values())
    num_layers = max(1, round((num_bytes - 4 * vocab * hidden) / layer_bytes))
    shapes = {f"layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}
    return {"embed_tokens.weight": [vocab, hidden], **shapes, "lm_head.weight": [vocab, hidden]}


def make_checkpoints(folder: Path, num_bytes: int) -> None:
    """`import` and `whole`, and the expected shapes in `shapes.json`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    shapes = llama_shapes(num_bytes)
    (folder / "shapes.json").write_text(json.dumps(shapes))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    dcp.save({"model": tensors}, checkpoint_id=folder / "whole", no_dist=True)
    save_file(tensors, folder / "model.safetensors")
    command = [sys.executable, "-m", "ckptool", "import-hf", "-q", folder / "model.safetensors", folder / "import"]
    subprocess.run(command, check=True)
    (folder / "model.safetensors").unlink()


def load(folder: Path, checkpoint: str, reader: str, world_size: int) -> dict[str, Any]:
    """One load on so many ranks. Raises RuntimeError with their output when it fails."""
    (folder / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    shapes = (folder / "shapes.json").read_text()
    done = subprocess.run(
        [*command, folder / "rank.py", folder / checkpoint, reader, shapes], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"{checkpoint}, {reader}, {world_size} ranks:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return {"checkpoint": checkpoint, "reader": reader, "world_size": world_size, **row}


def table(rows: list[dict[str, Any]], num_bytes: int, sizes: Iterable[int]) -> str:
    lines = [
        "| checkpoint | ranks | stock reads | ours reads | stock CPU s | ours CPU s | ours / stock |",
        "|---|---|---|---|---|---|---|",
    ]
    for checkpoint in ("import", "whole"):
        for world_size in sizes:
            cells = {}
            for reader in READERS:
                runs = [
                    r
                    for r in rows
                    if (r["checkpoint"], r["reader"], r["world_size"]) == (checkpoint, reader, world_size)
                ]
                cells[reader] = (
                    runs[0]["num_bytes"] / num_bytes,
                    statistics.median(run["cpu_seconds"] for run in runs),
                )
            (stock_bytes, stock_cpu), (our_bytes, our_cpu) = cells["stock"], cells["ours"]
            lines.append(
                f"| {checkpoint} | {world_size} | {stock_bytes:.3f} x | {our_bytes:.3f} x "
                f"| {stock_cpu:.2f} | {our_cpu:.2f} | {our_cpu / stock_cpu:.2f} |"
            )
    return "\n".join(lines)


@click.command()
@click.option("--gigabytes", default=3.0, show_default=True)
@click.option("--ranks", default="2,3,4,5,6,7,8,16", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
def main(gigabytes: float, ranks: str, rounds: int, work: Path | None) -> None:
    sizes = [int(size) for size in ranks.split(",")]
    with tempfile.TemporaryDirectory(dir=work, prefix="read-") as name:
        folder = Path(name)
        make_checkpoints(folder, int(gigabytes * 1e9))
        shapes = json.loads((folder / "shapes.json").read_text())
        num_bytes = 2 * sum(rows * (rest[0] if rest else 1) for rows, *rest in shapes.values())
        rows = []
        for number in range(rounds):
            for world_size in sizes:
                for checkpoint in ("import", "whole"):
                    for reader in READERS:
                        row = load(folder, checkpoint, reader, world_size)
                        print(f"round {number}: {row}", file=sys.stderr, flush=True)
                        rows.append(row)
    if len({row["sum"] for row in rows}) != 1:
        raise click.ClickException("the loads gave different tensors")
    text = f"{num_bytes / 1e9:.1f} GB in {len(shapes)} bf16 tensors, {rounds} rounds; {machine()}\n\n"
    text += table(rows, num_bytes, sizes) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "read.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RESULTS / "read.md").write_text(text)


if __name__ == "__main__":
    main()
