"""Checkpoints that other libraries save themselves, sharded over two ranks, exported without them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptool
from ckptool.cli.main import run
from ckptool.errors import NotFoundError
from tests.spawn import run_ranks
from tests.tiny_models import llama


def trained() -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model with one step of AdamW behind it."""
    model = llama(dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return model, optimizer


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def save_with_accelerate(rank: int, folder: Path) -> dict[str, torch.Tensor] | None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # accelerate asks for them, and uses neither
    model, optimizer = trained()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    tensors = whole(model)
    return tensors if rank == 0 else None


def save_with_fabric(rank: int, folder: Path) -> dict[str, torch.Tensor] | None:
    from lightning.fabric.strategies.model_parallel import _save_checkpoint

    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "iteration": 1}
    _save_checkpoint(path=folder, state=state, full_state_dict=False, rank=rank)
    tensors = whole(model)
    return tensors if rank == 0 else None


def assert_exports(path: Path, tensors: dict[str, torch.Tensor], out: Path, **options: Any) -> None:
    ckptool.export(str(path), out=out, **options)
    ours = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())


def test_31_accelerates_folder_means_the_model_inside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NeMo-RL#1427, accelerate#2848: given the parent folder."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = tmp_path / "checkpoint-1"
    tensors = run_ranks(2, save_with_accelerate, folder)[0]
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    llama().config.save_pretrained(folder)  # as the Trainer of transformers does
    assert_exports(folder, tensors, tmp_path / "out")
    assert run(["inspect", str(folder / "optimizer_0")]) == 0
    assert "sections: optimizer" in capsys.readouterr().out
    with pytest.raises(NotFoundError, match="no tensors of a model"):
        ckptool.export(str(folder / "optimizer_0"))
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(NotFoundError, match="has some inside") as refused:
        ckptool.export(str(folder))
    assert "pytorch_model_fsdp_0" in refused.value.hint and "pytorch_model_fsdp_1" in refused.value.hint


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_fabric(tmp_path: Path) -> None:
    tensors = run_ranks(2, save_with_fabric, tmp_path / "c")[0]
    llama().config.save_pretrained(tmp_path / "like")
    assert_exports(tmp_path / "c", tensors, tmp_path / "out", config=str(tmp_path / "like"))
