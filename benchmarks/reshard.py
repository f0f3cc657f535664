"""Resharding next to `cp` and next to what people do today: load on the new ranks, and save there.

    python benchmarks/reshard.py compare --gigabytes 3 --rounds 5

The checkpoint is stored for 8 ranks. `to 6` rewrites every byte, `to 4` fits and is linked, `to 4 rewritten` doesn't
link, `to tp` cuts columns too. The peer runs `dcp.load` into DTensors and `dcp.save` on gloo ranks of this machine; its
memory is that of its largest process. Writes benchmarks/results/reshard-{gigabytes}gb.md and the raw rows beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from convert import make_model
from measure import in_turns, machine, table, write_rows

RESULTS = Path(__file__).parent / "results"
STORED_RANKS, NEW_RANKS, FITTING_RANKS = 8, 6, 4
BASE = "cp + sync"


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("source")
@click.argument("target")
def peer(source: str, target: str) -> None:
    """What one of the new ranks does; torchrun starts them."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    entries = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    model = {
        fqn.removeprefix("model."): zeros(
            entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=[Shard(0)]
        )
        for fqn, entry in entries.items()
    }
    dcp.load({"model": model}, checkpoint_id=source)
    dcp.save({"model": model}, checkpoint_id=target)
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["sync", "-f", target], check=True)
    dist.destroy_process_group()


@main.command()
@click.option("--gigabytes", default=3.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
def compare(gigabytes: float, rounds: int, work: Path | None) -> None:
    """Measure everything and write the table."""
    with tempfile.TemporaryDirectory(dir=work, prefix="reshard-") as name:
        folder = Path(name)
        # In a process of its own: the memory of this one would count for those that it starts.
        subprocess.run([sys.executable, __file__, "make", folder, str(gigabytes)], check=True)
        source, out = str(folder / "source"), str(folder / "out")
        ours = [sys.executable, "-m", "ckptool", "reshard", "-q", source, out]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NEW_RANKS)]
        commands = {
            BASE: ["sh", "-c", f"cp -r {source} {out} && sync -f {out}"],
            "import torch.distributed.checkpoint": [sys.executable, "-c", "import torch.distributed.checkpoint"],
            f"ckptool reshard, to {NEW_RANKS}": [*ours, "--world-size", str(NEW_RANKS)],
            f"ckptool reshard, to {FITTING_RANKS}": [*ours, "--world-size", str(FITTING_RANKS)],
            f"ckptool reshard, to {FITTING_RANKS} rewritten": [*ours, "--world-size", str(FITTING_RANKS), "--rewrite"],
            "ckptool reshard, to tp": [*ours, "--mesh", "dp_shard=2,tp=4"],
            f"dcp.load + dcp.save on {NEW_RANKS} ranks": [*torchrun, __file__, "peer", source, out],
        }
        rows = in_turns(commands, rounds, before=lambda name: shutil.rmtree(out, ignore_errors=True))
    text = f"{gigabytes:g} GB of {STORED_RANKS} ranks, {rounds} rounds, {machine()}\n\n{table(rows, BASE)}\n"
    print(text)
    stem = f"reshard-{gigabytes:g}gb"
    write_rows(RESULTS / f"{stem}.jsonl", rows)
    (RESULTS / f"{stem}.md").write_text(text)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("gigabytes", type=float)
def make(folder: Path, gigabytes: float) -> None:
    """Make FOLDER/source: a bf16 Llama of about this size, stored for STORED_RANKS ranks."""
    make_model(folder / "hf", int(gigabytes * 1e9))
    command = [sys.executable, "-m", "ckptool"]
    subprocess.run([*command, "import-hf", "-q", folder / "hf", folder / "whole"], check=True)
    shutil.rmtree(folder / "hf")
    world_size = ["--world-size", str(STORED_RANKS)]
    subprocess.run([*command, "reshard", "-q", folder / "whole", folder / "source", *world_size], check=True)
    shutil.rmtree(folder / "whole")


if __name__ == "__main__":
    main()
