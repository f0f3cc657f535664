"""A report's contents as large as they get, with names that try to break out of the page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, Locator, TensorEntry
from ckptool.ops.report.contents import Contents
from ckptool.ops.report.shards import map_shards
from ckptool.ops.report.sizes import module_sizes
from ckptool.ops.report.statistics import NUM_BINS, ValueStatistics
from ckptool.ops.report.steps import Steps
from ckptool.ops.report.subject import Subject

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>\u202e$$x$$"


def big_manifest(num_layers: int, num_ranks: int, name: str = "w") -> Manifest:
    """Five tensors a layer, each cut over all ranks."""
    ends: Counter[str] = Counter()
    tensors = {}
    for fqn in (f"model.layers.{layer}.part{number}.{name}" for layer in range(num_layers) for number in range(5)):
        chunks = []
        for rank in range(num_ranks):
            file = f"__{rank}_0.distcp"
            chunks.append(Chunk(Box((rank * 8, 0), (8, 128)), Locator(file, ends[file], 4096)))
            ends[file] += 4096
        tensors[fqn] = TensorEntry(fqn, "float32", (8 * num_ranks, 128), tuple(chunks))
    return Manifest("x", tensors, files=dict(ends))


def big_contents(num_layers: int = 100, num_ranks: int = 200, num_steps: int = 100_000, name: str = EVIL) -> Contents:
    manifest = big_manifest(num_layers, num_ranks, name)
    records = [
        {
            "step": number,
            "loss": 5 / (1 + number / 1000),
            "grad_norm": 1.0 + number % 13,
            "lr": 1e-3,
            "tokens_per_second": 1e4 + number % 7,
            "consumed": number * 8,
            "attempt": f"{number // 20_000} {name}",
            "world_size": 8 - number // 20_000,
            "checkpoint_seconds": float(number % 1000 == 0),
        }
        for number in range(1, num_steps + 1)
    ]
    return Contents(
        Subject(Path("run/step-1"), Path(f"run {name}")),
        steps=Steps().add(records),
        manifest=manifest,
        shards=map_shards(manifest),
        modules=module_sizes(manifest),
        tensors=[ValueStatistics(fqn, 10, 3.0, 2.0, histogram=tuple(range(NUM_BINS))) for fqn in manifest.tensors],
        notes=[name],
    )
