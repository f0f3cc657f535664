"""Our reader behind torch's own `dcp.load`: bit-equal to torch's, few bytes, and refusals instead of surprises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptool
from ckptool import DamagedError, MismatchError, NotFoundError, StorageReader
from ckptool.storage.files import RangeReader
from tests.spawn import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors() -> dict[str, torch.Tensor]:
    """Odd and even rows, several dtypes and dims, a transposed one, a scalar and an empty one."""
    numbers = torch.arange(7 * 40 * 6, dtype=torch.float32)
    return {
        "rows": numbers.reshape(280, 6),
        "wide": numbers.bfloat16().reshape(7, 240),
        "cube": numbers.to(torch.int32).reshape(7, 40, 6),
        "transposed": numbers.reshape(40, 42).t(),
        "few": torch.tensor([True, False, True]),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
    }


def saved(folder: Path) -> Path:
    dcp.save({"model": tensors(), "step": 3, "lr": [0.1, "x"]}, checkpoint_id=folder, no_dist=True)
    return folder


def blank() -> dict[str, Any]:
    return {"model": {name: torch.zeros_like(t) for name, t in tensors().items()}, "step": 0, "lr": []}


def load(state: dict[str, Any], reader: dcp.StorageReader) -> None:
    dcp.load(state, storage_reader=reader, no_dist=True)


def test_one_process_gets_what_torch_gets(tmp_path: Path) -> None:
    ours, stock = blank(), blank()
    load(ours, StorageReader(saved(tmp_path / "c")))
    load(stock, dcp.FileSystemReader(tmp_path / "c"))
    for name, tensor in stock["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
    assert (ours["step"], ours["lr"]) == (stock["step"], stock["lr"]) == (3, [0.1, "x"])


def test_tensors_that_are_not_contiguous_are_filled(tmp_path: Path) -> None:
    state = {"model": {"rows": torch.zeros(6, 280).t()}}
    load(state, StorageReader(saved(tmp_path / "c")))
    assert torch.equal(state["model"]["rows"], tensors()["rows"])


def load_sharded(rank: int, folder: str) -> tuple[int, int]:
    """Bytes read by ours and by torch's reader, over all ranks; the tensors are compared here."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"wide": Shard(1), "few": Replicate(), "one": Replicate()}
    counted = [0]

    def count(self: RangeReader, name: str, offset_bytes: int, out: memoryview) -> None:
        counted[0] += len(out)
        read_into(self, name, offset_bytes, out)

    read_into, RangeReader.read_into = RangeReader.read_into, count  # type: ignore[method-assign]
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(t), mesh, [placements.get(name, Shard(0))])
        for name, t in tensors().items()
    }
    dcp.load({"model": state}, storage_reader=StorageReader(folder))
    for name, tensor in tensors().items():
        assert isinstance(state[name], DTensor)
        assert torch.equal(state[name].full_tensor(), tensor), name
    total = torch.tensor(counted)
    dist.all_reduce(total)
    return int(total), sum(t.nbytes for t in tensors().values())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_their_bytes_of_a_whole_tensor_checkpoint(tmp_path: Path, world_size: int) -> None:
    (num_read, num_bytes), *_ = run_ranks(world_size, load_sharded, str(saved(tmp_path / "c")))
    # A column split and a transposed tensor are read whole by each rank, and each archive has a few KB of description.
    whole = tensors()["wide"].nbytes + tensors()["transposed"].nbytes
    descriptions = 7 * world_size * (8 << 10)
    assert num_bytes <= num_read <= num_bytes + (world_size - 1) * whole + descriptions


def test_another_dtype_is_refused_or_asked_for(tmp_path: Path) -> None:
    state = {"model": {"rows": torch.zeros(280, 6, dtype=torch.float64)}}
    with pytest.raises(CheckpointException, match=r"rows is torch\.float32 in the checkpoint, torch\.float64 here"):
        load(state, StorageReader(saved(tmp_path / "c")))
    load(state, StorageReader(tmp_path / "c", allow_cast=True))
    assert torch.equal(state["model"]["rows"], tensors()["rows"].double())


def test_a_cast_that_would_make_an_infinity_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.tensor([1.0, 1e6, float("inf")])}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match="a: 1 values are too large for float16"):
        load({"a": torch.zeros(3, dtype=torch.float16)}, StorageReader(tmp_path / "c", allow_cast=True))
    with pytest.raises(MismatchError, match="a: 1 values are too large for float16"):
        ckptool.load({"a": torch.zeros(3, dtype=torch.float16)}, tmp_path / "c", allow_cast=True)


def test_a_checkpoint_that_can_not_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        StorageReader(tmp_path)
    (file,) = saved(tmp_path / "c").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(DamagedError, match="truncated"):
        StorageReader(tmp_path / "c")


class Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_an_object_that_would_run_code_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": Command(f"touch {tmp_path}/ran")}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match="more than plain data; nothing was run"):
        load({"a": 1}, StorageReader(tmp_path / "c"))
    assert not (tmp_path / "ran").exists()


def test_a_reader_goes_on_with_another_checkpoint(tmp_path: Path) -> None:
    reader = StorageReader(saved(tmp_path / "c"))
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "d", no_dist=True)
    state = {"a": torch.zeros(3)}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "d", no_dist=True)
    assert torch.equal(state["a"], torch.ones(3))
