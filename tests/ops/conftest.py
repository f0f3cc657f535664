"""Checkpoints of every kind, made once, and copies of them that a test may damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptool
from tests.spawn import run_ranks
from tests.tiny_models import llama, mixtral, save_folder

Copy = Callable[[str], Path]


def trained_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "layers.0.up": torch.randn(7, 5),
        "layers.1.up": torch.randn(7, 5),
        "embed": torch.randn(9, 4).bfloat16(),
        "columns": torch.randn(6, 8),
        "scale": torch.tensor(2.5),
    }


def save_sharded(rank: int, root: Path) -> None:
    """A trainer's save on two ranks: rows, columns, replicas, a tie, objects, optimizer state, side files."""
    mesh = init_device_mesh("cpu", (2,))
    placements = {"columns": Shard(1), "scale": Replicate()}
    tensors = trained_tensors()
    model = {n: distribute_tensor(t, mesh, [placements.get(n, Shard(0))]) for n, t in tensors.items()}
    optim = {"state": {n: {"exp_avg": torch.zeros_like(t)} for n, t in model.items()}}
    (root / "side").mkdir(exist_ok=True)
    (root / "side" / "config.json").write_text('{"dtype": "float32"}')
    ckptool.save(
        {"model": model, "optim": optim, "step": 7, "data": {"record": "{}", "cursor": torch.arange(8)}},
        root / "sharded",
        provenance=ckptool.Provenance("0", step=7, world_size=2, ties={"head": "embed"}),
        ties={"model.head": "model.embed"},
        side_folder=root / "side",
    )


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with `tiny-hf`, `moe-hf` (Hugging Face folders), `tiny`, `moe` (their imports), `sharded` (a training
    checkpoint of two ranks) and `foreign` (by torch alone)."""
    root = tmp_path_factory.mktemp("kinds")
    save_folder(llama(), root / "tiny-hf")
    save_folder(mixtral(), root / "moe-hf", max_shard_size="60KB")
    for name in ("tiny", "moe"):
        ckptool.import_hf(str(root / f"{name}-hf"), name, root=root, chunk_bytes=4096)
    run_ranks(2, save_sharded, root)
    state = {"model": trained_tensors(), "step": 7, "note": {"lr": [0.1, None, True]}}
    dcp.save(state, checkpoint_id=root / "foreign", no_dist=True)
    return root


@pytest.fixture
def copy_of(kinds: Path, tmp_path: Path) -> Copy:
    """A fresh copy, by name, below `tmp_path`."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(kinds / name, tmp_path / name))

    return copy
