"""Planning and ending a save on very many ranks: what ranks tell, and how long the first one thinks, beside torch.

    python benchmarks/save_plan.py --ranks 8,64,512

The state is that of an 8B Llama with AdamW, sharded by FSDP2: 291 parameters with two moments, and a step each. What
the ranks say is made here, in one process, one rank after another; no network is part of it. `torch`: the local plans
of its DefaultSavePlanner as they are gathered, and its global plan, which its first rank makes at each save. `ours,
first save`: what is told and planned at the first save of a training; `later`: the state has not changed. Metadata: to
unpack what the ranks have written, and to write `.metadata`; of ours `digests.json` too, and in a process beside the
one that trains.
Writes benchmarks/results/save_plan.md and .jsonl.
"""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from measure import machine
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckptool.core.box import Box
from ckptool.core.parts import FileRecord
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.formats.dcp_metadata import PROVENANCE_FILE
from ckptool.formats.dcp_writers import Finish
from ckptool.save_plan import Description, Held, plan_saves
from ckptool.storage.digest import TensorDigest

RESULTS = Path(__file__).parent / "results"


def shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of Llama-3.1-8B by name."""
    made: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (128_256, 4096), "lm_head.weight": (128_256, 4096)}
    for i in range(32):
        block = {
            "self_attn.q_proj": (4096, 4096),
            "self_attn.k_proj": (1024, 4096),
            "self_attn.v_proj": (1024, 4096),
            "self_attn.o_proj": (4096, 4096),
            "mlp.gate_proj": (14_336, 4096),
            "mlp.up_proj": (14_336, 4096),
            "mlp.down_proj": (4096, 14_336),
            "input_layernorm": (4096,),
            "post_attention_layernorm": (4096,),
        }
        made |= {f"layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return made | {"norm.weight": (4096,)}


def state() -> dict[str, tuple[int, ...]]:
    """Every tensor of the training state."""
    parts = ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
    return {part.format(name): shape for name, shape in shapes().items() for part in parts}


def rows_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> Box | None:
    """What FSDP2 gives to a rank; None for nothing."""
    step = -(-shape[0] // num_ranks)
    first, last = min(shape[0], rank * step), min(shape[0], (rank + 1) * step)
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])) if last > first else None


def torch_plan(tensors: dict[str, tuple[int, ...]], rank: int, num_ranks: int) -> SavePlan:
    """What torch's planner makes of a rank's shards."""
    items = []
    for fqn, shape in tensors.items():
        box = rows_of(shape, rank, num_ranks)
        if box is None:
            continue
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(fqn, torch.Size(box.offsets)), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def held(description: Description, rank: int, num_ranks: int) -> Held:
    boxes = {fqn: rows_of(entry.shape, rank, num_ranks) for fqn, entry in description.entries.items()}
    return Held(description, {fqn: box for fqn, box in boxes.items() if box is not None})


def torch_finish(plans: list[SavePlan], folder: Path) -> float:
    """Seconds of the first rank, from the results of all to `.metadata`."""
    _, metadata = create_default_global_save_plan(plans)
    told = []
    for rank, plan in enumerate(plans):
        places = [_StorageInfo(f"__{rank}_0.distcp", 1000 * i, 1000) for i in range(len(plan.items))]
        told.append(pickle.dumps([WriteResult(i.index, 1000, p) for i, p in zip(plan.items, places, strict=True)]))
    writer = FileSystemWriter(folder)
    return seconds_of(lambda: writer.finish(metadata, [pickle.loads(results) for results in told]))


def our_finish(parts: list[Held], folder: Path) -> float:
    """The same of ours."""
    told = []
    for rank, part in enumerate(parts):
        file = f"__{rank}_1.distcp"
        chunks = {fqn: (Chunk(box, Locator(file, 1000 * i, 1000)),) for i, (fqn, box) in enumerate(part.boxes.items())}
        digests = {fqn: str(TensorDigest()) for fqn in chunks}
        told.append(pickle.dumps([FileRecord(file, 1000 * len(chunks), "0" * 64, chunks, digests=digests)]))
    (folder / PROVENANCE_FILE).write_text("{}")
    description = parts[0].description
    return seconds_of(Finish(folder, description.entries, description.paths, {}, told).run)


def seconds_of(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(num_ranks: int, rounds: int) -> dict[str, Any]:
    """One row: bytes that all ranks tell, and the seconds of the first one's planning, medians in turns."""
    tensors = state()
    entries = {fqn: TensorEntry(fqn, "bfloat16", shape, ()) for fqn, shape in tensors.items()}
    steps = [f"optim.state.{name}.step" for name in shapes()]
    description = Description(entries, tuple(steps), {fqn: tuple(fqn.split(".")) for fqn in (*tensors, *steps)})
    plans = [torch_plan(tensors, rank, num_ranks) for rank in range(num_ranks)]
    parts = [held(description, rank, num_ranks) for rank in range(num_ranks)]
    told = [sorted((fqn, box.offsets, box.sizes) for fqn, box in part.boxes.items()) for part in parts]
    theirs, ours, known, their_ends, our_ends = [], [], [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            their_ends.append(torch_finish(plans, Path(one)))
            our_ends.append(our_finish(parts, Path(other)))
        theirs.append(seconds_of(lambda: create_default_global_save_plan(plans)))
        ours.append(seconds_of(lambda: plan_saves(parts)))
        known.append(seconds_of(lambda: (description.fingerprint(), repr(told[0]))))
    return {
        "ranks": num_ranks,
        "chunks": sum(len(part.boxes) for part in parts),
        "torch_megabytes": sum(len(pickle.dumps(plan)) for plan in plans) / 1e6,
        "ours_megabytes": sum(len(pickle.dumps(boxes)) for boxes in told) / 1e6,
        "torch_seconds": round(statistics.median(theirs), 3),
        "ours_seconds": round(statistics.median(ours), 3),
        "ours_later_seconds": round(statistics.median(known), 4),
        "torch_metadata_seconds": round(statistics.median(their_ends), 3),
        "ours_metadata_seconds": round(statistics.median(our_ends), 3),
    }


@click.command()
@click.option("--ranks", default="8,64,512", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(ranks: str, rounds: int) -> None:
    """Measure each number of ranks."""
    rows = [measure(int(number), rounds) for number in ranks.split(",")]
    (RESULTS / "save_plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        f"{machine()}; 8B with AdamW",
        "",
        "| ranks | chunks | told to the first rank, MB: torch, each save | ours, first save "
        "| planning, s: torch, each save | ours, first save | later | metadata, s: torch | ours, in another process |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']:,} | {row['chunks']:,} | {row['torch_megabytes']:.1f} | {row['ours_megabytes']:.1f} "
            f"| {row['torch_seconds']:.2f} | {row['ours_seconds']:.2f} | {row['ours_later_seconds']:.3f} "
            f"| {row['torch_metadata_seconds']:.2f} | {row['ours_metadata_seconds']:.2f} |"
        )
    (RESULTS / "save_plan.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
