"""Start-up on large checkpoints: `ckptool inspect` and `verify --level structure` next to torch's own `pickle.load`.

    python benchmarks/startup.py --chunks 200000 --rounds 5

The checkpoint is a `.metadata` made of torch's own classes, as a save on 250 ranks writes it, over sparse files. Each
row is a process of its own, start included. torch reads the pickle with Python's garbage collection on; a row with it
off shows what that costs. Writes benchmarks/results/startup.md and startup.jsonl.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from measure import in_turns, machine, table, write_rows

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 250
CHUNK_BYTES = 200_000

READ_WITH_TORCH = """
import gc, pickle, sys
import torch.distributed.checkpoint
if sys.argv[2] == "off":
    gc.disable()
with open(sys.argv[1], "rb") as file:
    pickle.load(file)
"""


def make_checkpoint(folder: Path, num_chunks: int) -> None:
    """Row-sharded tensors, a chunk a rank each; every rank sends its own copies of the names, as DCP's gather does."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(num_chunks // NUM_RANKS)]
    boxes = [
        [ChunkStorageMetadata(torch.Size([8 * rank, 0]), torch.Size([8, 4096])) for rank in range(NUM_RANKS)]
        for _ in names
    ]
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8 * NUM_RANKS, 4096]), chunks)
        for name, chunks in zip(names, boxes, strict=True)
    }
    places: dict[Any, Any] = {}
    for rank in range(NUM_RANKS):
        file = f"__{rank}_0.distcp"
        with (folder / file).open("wb") as data:
            data.truncate(CHUNK_BYTES * len(names))
        for i, name in enumerate(names):
            index = MetadataIndex((name + " ")[:-1], boxes[i][rank].offsets, rank)
            places[index] = _StorageInfo(file, i * CHUNK_BYTES, CHUNK_BYTES)
    paths = {name: tuple(name.split(".", 1)) for name in names}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, paths, places, StorageMeta())))


@click.command()
@click.option("--chunks", default=200_000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(chunks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        # In a process of its own: a child's peak memory begins with its parent's.
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(folder, chunks))
        maker.start()
        maker.join()
        num_bytes = (folder / ".metadata").stat().st_size
        ours = [sys.executable, "-m", "ckptool"]
        torch_alone = [sys.executable, "-c", READ_WITH_TORCH, str(folder / ".metadata")]
        commands = {
            "import torch.distributed.checkpoint": [sys.executable, "-c", "import torch.distributed.checkpoint"],
            "the same + pickle.load": [*torch_alone, "on"],
            "the same + pickle.load without garbage collection": [*torch_alone, "off"],
            "ckptool inspect": [*ours, "inspect", str(folder), "--json"],
            "ckptool verify --level structure": [*ours, "verify", "-q", "--level", "structure", str(folder)],
        }
        rows = in_turns(commands, rounds, lambda name: None)
    text = f"{chunks} chunks, {num_bytes / 1e6:.0f} MB of metadata, {rounds} rounds; {machine()}\n\n"
    text += table(rows, "import torch.distributed.checkpoint") + "\n"
    print(text)
    write_rows(RESULTS / "startup.jsonl", rows)
    (RESULTS / "startup.md").write_text(text)


if __name__ == "__main__":
    main()
