"""torch's own `dcp.load`, on any number of ranks, reads what import-hf wrote, and little more than its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptool
from tests.spawn import run_ranks
from tests.tiny_models import llama, save_folder

SIZES = {"vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1376, "head_dim": 64, "num_attention_heads": 8}


class CountingReader(dcp.FileSystemReader):
    """The stock reader, which reads every chunk that it touches whole; counts those bytes."""

    num_bytes = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.num_bytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


def load_sharded(rank: int, checkpoint: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = llama(tied=False, **SIZES)
    model = llama(tied=False, **SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    reader = CountingReader(checkpoint)
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=reader)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state["model"][name].full_tensor(), tensor), name
    read = torch.tensor(reader.num_bytes)
    dist.all_reduce(read)
    stored = sum(t.numel() * t.element_size() for t in expected.state_dict().values())
    ratio = int(read) / stored
    assert ratio < 1.15, f"{dist.get_world_size()} ranks read {ratio:.3f} times the model"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    save_folder(llama(tied=False, **SIZES), folder / "model")
    ckptool.import_hf(str(folder / "model"), "base", root=folder)
    return folder / "base"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stock_load_reads_an_import_exactly(checkpoint: Path, world_size: int) -> None:
    run_ranks(world_size, load_sharded, str(checkpoint))
