"""Saves beside the training: what is stored is the snapshot, whatever happens after it, and errors are not lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptool
from ckptool import AsyncSaver, MismatchError, NotFoundError, TargetExistsError, distributed_async
from ckptool.errors import StorageError
from tests.spawn import run_ranks


def whole_tensors() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "columns": torch.arange(14.0, dtype=torch.bfloat16).reshape(2, 7),
        "one_row": torch.arange(3.0).reshape(1, 3),
        "everywhere": torch.arange(4.0),
    }


def make_state(world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    placements = {"columns": Shard(1), "everywhere": Replicate()}
    model = {
        name: distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))])
        for name, tensor in whole_tensors().items()
    }
    return {"model": model, "optim": {"steps": [torch.tensor(3.0), torch.zeros(0, 2)]}, "step": 7, "data": {"at": [1]}}


def train_on(state: dict[str, Any]) -> None:
    """Change everything in place."""
    for tensor in [*state["model"].values(), *state["optim"]["steps"]]:
        tensor.add_(1)
    state["data"]["at"].append(2)
    state["step"] += 1


def save_on_ranks(rank: int, root: Path, world_size: int) -> dict[str, Any]:
    distributed_async.SMALL_BYTES = 0 if rank == 0 else 1 << 30
    state = make_state(world_size)
    with AsyncSaver(num_writers=1) as saver:
        first = saver.save(state, root / "step-7", ties={"model.alias": "model.rows"})
        train_on(state)
        second = saver.save(state, root / "step-8", provenance=ckptool.Provenance("0", step=8))
        train_on(state)
        facts = {"one at a time": first.done(), "durable": first.durable_seconds, "host": saver.host_bytes}
        second.result(60)
        with pytest.raises(TargetExistsError):
            saver.save(state, root / "step-7").result()
        assert saver.pending is not None
        with pytest.raises(TargetExistsError):
            saver.check()
        saver.check()
        saver.save({"rng": torch.full((2,), rank)}, root / "step-9")
        if world_size == 2:
            with pytest.raises(MismatchError, match="rng"):
                saver.wait()
    return facts


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_stored_is_the_snapshot(tmp_path: Path, world_size: int) -> None:
    for facts in run_ranks(world_size, save_on_ranks, tmp_path, world_size):
        assert facts["one at a time"]
        assert facts["durable"] > 0
        assert 0 < facts["host"] < 10_000
    for number, name in enumerate(["step-7", "step-8"]):
        assert not ckptool.verify(tmp_path / name, level="content").findings
        loaded: dict[str, Any] = {
            "model": {key: torch.zeros_like(tensor) for key, tensor in whole_tensors().items()},
            "optim": {"steps": [torch.zeros(()), torch.zeros(0, 2)]},
            "step": 0,
            "data": {"at": []},
        }
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        for key, tensor in whole_tensors().items():
            assert torch.equal(loaded["model"][key], tensor + number)
        assert loaded["optim"]["steps"][0] == 3 + number
        assert loaded["step"] == 7 + number
        assert loaded["data"]["at"] == [1, 2][: number + 1]
    manifest = ckptool.open_checkpoint(tmp_path / "step-7")
    assert manifest.ties == {"model.alias": "model.rows"}
    assert len(manifest.tensors["model.everywhere"].chunks) == 1
    assert (tmp_path / "step-9").exists() == (world_size == 1)


def test_an_async_save_is_the_sync_one(tmp_path: Path) -> None:
    state = {"model": whole_tensors(), "step": 7}
    ckptool.save(state, tmp_path / "sync", provenance=ckptool.Provenance("0"))
    ckptool.async_save(state, tmp_path / "async", provenance=ckptool.Provenance("0")).result()
    sync, asynchronous = (ckptool.open_checkpoint(tmp_path / name) for name in ("sync", "async"))
    assert {f: (t.dtype, t.shape) for f, t in sync.tensors.items()} == {
        f: (t.dtype, t.shape) for f, t in asynchronous.tensors.items()
    }
    assert sync.paths == asynchronous.paths
    assert ckptool.diff(tmp_path / "sync", tmp_path / "async").equal


def test_a_failed_save_leaves_nothing_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_async, "SMALL_BYTES", 0)
    state = {"model": whole_tensors()}
    with AsyncSaver(num_writers=1) as saver:
        with pytest.raises(NotFoundError, match="gone"):
            saver.save(state, tmp_path / "step-1", side_folder=tmp_path / "gone").result()
        with pytest.raises(NotFoundError):
            saver.wait()
        assert saver._writers is None or saver._writers._processes == []
        pending = saver.save(state, tmp_path / "step-1")
        assert saver._writers is not None
        saver._writers._processes[0].kill()
        with pytest.raises(StorageError, match="died"):
            pending.result()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(StorageError, match="died"):
            saver.save(state, tmp_path / "step-2")
        saver.save(state, tmp_path / "step-2").result()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_leaving_after_an_error_still_finishes_the_good_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AsyncSaver(num_writers=1) as saver:
        saver.save({"model": whole_tensors()}, tmp_path / "step-1")
        raise ZeroDivisionError
    assert not ckptool.verify(tmp_path / "step-1", level="bytes").findings


SCRIPT = """
import os, signal, sys
import torch, ckptool
from pathlib import Path

root, how = Path(sys.argv[1]), sys.argv[2]
state = {"model": {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(16)}}
if how == "killed":
    ckptool.save(state, root / "step-1", provenance=ckptool.Provenance("0"))
    saver = ckptool.AsyncSaver(num_writers=2)
    saver.save(state, root / "step-2")
    print(*(process.pid for process in saver._writers._processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
ckptool.async_save(state, root / "step-3")
"""


def run_script(root: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(root), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_killed_while_it_writes_the_checkpoint_before_is_the_latest(tmp_path: Path) -> None:
    done = run_script(tmp_path, "killed")
    assert done.returncode == -signal.SIGKILL
    latest = ckptool.find_latest(tmp_path)
    assert latest is not None and latest.path.name == "step-1"
    deadline = time.monotonic() + 30
    while any(is_running(int(pid)) for pid in done.stdout.split()):
        assert time.monotonic() < deadline, "writers outlive the process that they write for"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ends")
    assert (done.returncode, done.stderr) == (0, "")
    assert not ckptool.verify(tmp_path / "step-3", level="bytes").findings


def test_the_error_of_the_last_save_is_seen_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "something").touch()
    done = run_script(tmp_path, "ends")
    assert "step-3 already exists" in done.stderr


def test_what_is_wrong_with_the_metadata_comes_back_from_the_process_that_writes_it(tmp_path: Path) -> None:
    large = {"model": {name: torch.ones(3 << 20) for name in ("a", "b", "c")}}
    with AsyncSaver(num_writers=2) as saver:
        with pytest.raises(MismatchError, match=r"model\.b is tied to model\.a, but is being saved"):
            saver.save(large, tmp_path / "one", ties={"model.b": "model.a"}).result()
        assert not (tmp_path / "one").exists()
        with contextlib.suppress(MismatchError):  # which nobody has seen in `save` or `wait` yet
            saver.wait()
        saver.save(large, tmp_path / "two", ties={"model.d": "model.a"}).result()
    assert not ckptool.verify(tmp_path / "two", level="bytes").findings
