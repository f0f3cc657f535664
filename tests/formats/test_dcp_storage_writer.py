"""`dcp.save` and `dcp.async_save` of anyone's trainer, through ckptool.StorageWriter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptool
from tests.spawn import run_ranks


class Explodes:
    def __reduce__(self) -> Any:
        raise ValueError("disk on fire")


def save_on_ranks(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    state = {"model": {"rows": rows, "plain": torch.ones(2)}, "step": 7}
    writer = ckptool.StorageWriter(root / "step-7", ties={"model.head": "model.rows"})
    dcp.save(state, storage_writer=writer)
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state, storage_writer=writer)
    bad = {**state, "extra": Explodes()} if rank == 1 else state
    with pytest.raises(CheckpointException, match="disk on fire"):
        dcp.save(bad, storage_writer=writer, checkpoint_id=root / "step-8")
    state["model"]["plain"] += 1
    dcp.save(state, storage_writer=writer, checkpoint_id=root / "step-8")
    future = dcp.async_save(state, storage_writer=ckptool.StorageWriter(root / "step-9"))
    state["model"]["plain"] += 1
    future.result()


def test_two_ranks_publish_whole_checkpoints_or_nothing(tmp_path: Path) -> None:
    run_ranks(2, save_on_ranks, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-7", "step-8", "step-9"]
    for name, plain in (("step-7", 1), ("step-8", 2), ("step-9", 2)):
        assert not ckptool.verify(tmp_path / name, level="content").findings
        model = {"rows": torch.zeros(5, 3), "plain": torch.zeros(2)}
        ckptool.load({"model": model}, tmp_path / name, ignore=["model.head"])
        assert torch.equal(model["rows"], torch.arange(15.0).reshape(5, 3))
        assert torch.equal(model["plain"], torch.full((2,), float(plain)))
    manifest = ckptool.open_checkpoint(tmp_path / "step-7")
    assert manifest.ties == {"model.head": "model.rows"}
    assert manifest.provenance is not None and manifest.provenance.world_size == 2
