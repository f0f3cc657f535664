"""A training state goes to S3 and comes back: every rank brings up its own files, the marker is last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.errors import CkptoolError, StorageError, TargetExistsError
from ckptool.formats import dcp_sink
from ckptool.ops.reshard import reshard
from ckptool.ranks import Ranks
from ckptool.storage.place import place
from ckptool.storage.store import Store
from tests.spawn import run_ranks

S3 = fsspec.AbstractFileSystem
URL = "s3://bucket/runs/step-3"
PROVENANCE = ckptool.Provenance(tool_version=ckptool.__version__, step=3)


def state(fill: float) -> dict:
    """Rows split over the ranks, a plain tensor, a number."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(60.0).reshape(20, 3) + fill
    return {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(4) * fill}, "step": 3}


def at_s3(rank: int, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Ranks are forked from a server that may not have the environment."""
    os.environ.update(environment)
    return function(rank, *args)


def save(rank: int, mode: str, fill: float, overwrite: bool) -> None:
    if mode == "async":
        with ckptool.AsyncSaver() as saver:
            saver.save(state(fill), URL, provenance=PROVENANCE, overwrite=overwrite)
    else:
        ckptool.save(state(fill), URL, provenance=PROVENANCE, overwrite=overwrite)


def save_again(rank: int) -> tuple[str, tuple[float, float]]:
    """What a save over another one says, and what is there when it may."""
    save(rank, "sync", 1.0, False)
    refused = ""
    try:
        save(rank, "sync", 2.0, False)
    except TargetExistsError as error:
        refused = str(error)
    save(rank, "sync", 2.0, True)
    return refused, load(rank)


def load(rank: int) -> tuple[float, float]:
    template = state(0.0)
    ckptool.load(template, URL)
    w = template["model"]["w"]
    assert isinstance(w, DTensor)
    return w.full_tensor()[0, 0].item(), template["model"]["b"][0].item()


def fail_on_one_rank(rank: int) -> tuple[str, bool]:
    """What a save says when the store refuses one rank, and whether it left a marker; then one that goes well."""
    original = Store.put
    said = ""

    def put(self: Store, name: str, path: object) -> None:
        raise StorageError("no more")

    if rank == 1:
        Store.put = put  # type: ignore[method-assign, assignment]
    try:
        save(rank, "sync", 1.0, False)
    except CkptoolError as error:
        said = f"{type(error).__name__}: {error}"
    has_marker = ".metadata" in Store(URL).files
    torch.distributed.barrier()
    Store.put = original  # type: ignore[method-assign]
    save(rank, "sync", 1.0, False)  # what is left is no reason to refuse
    return said, has_marker


def test_two_ranks_save_and_three_load(s3: S3, s3_environment: dict[str, str]) -> None:
    run_ranks(2, at_s3, s3_environment, save, "async", 1.0, False)
    assert ckptool.verify(URL, level="content").exit_code == 0
    files = {path.removeprefix("bucket/runs/step-3/") for path in s3.find("bucket/runs/step-3")}
    assert {".metadata", "digests.json", "ckptool.json"} <= files
    assert {file[:3] for file in files if file.endswith(".distcp")} == {"__0", "__1"}
    assert not any(file.startswith(".ckptool-upload") for file in files)
    assert run_ranks(3, at_s3, s3_environment, load) == [(1.0, 1.0)] * 3


@pytest.mark.slow
def test_a_save_replaces_another_on_demand_only(s3: S3, s3_environment: dict[str, str]) -> None:
    assert run_ranks(2, at_s3, s3_environment, save_again) == [(f"{URL} already exists", (2.0, 2.0))] * 2


def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_marker(s3: S3, s3_environment: dict[str, str]) -> None:
    assert run_ranks(2, at_s3, s3_environment, fail_on_one_rank) == [("StorageError: rank 1: no more", False)] * 2
    assert ckptool.verify(URL).exit_code == 0


def test_one_process_saves_alone(s3: S3) -> None:
    ckptool.save({"model": {"w": torch.ones(3)}}, URL, provenance=PROVENANCE)
    with pytest.raises(TargetExistsError):
        ckptool.save({"model": {"w": torch.ones(3)}}, URL, provenance=PROVENANCE)
    loaded = {"model": {"w": torch.zeros(3)}}
    ckptool.load(loaded, URL)
    assert loaded["model"]["w"].tolist() == [1, 1, 1]


def convert(rank: int, hub_folder: str) -> None:
    dcp_sink._MIN_FILE_BYTES = 1  # type: ignore[misc]
    root, ranks = place("s3://bucket/runs"), Ranks()
    ckptool.import_hf(hub_folder, "m", root=root, ranks=ranks)
    ckptool.export("m", root=root, out=place("s3://bucket/back"), max_shard_bytes=40_000, ranks=ranks)
    reshard("m", "cut", root=root, mesh=Mesh.of({"dp": 3}), rewrite=True, ranks=ranks)


def test_ranks_share_conversions_into_a_store_out(s3: S3, s3_environment: dict[str, str], hub_folder: Path) -> None:
    run_ranks(2, at_s3, s3_environment, convert, str(hub_folder))
    for name in ("runs/m", "runs/cut", "back"):
        assert ckptool.diff(f"s3://bucket/{name}", str(hub_folder)).equal
    for name in ("runs/m", "runs/cut"):
        assert ckptool.verify(f"s3://bucket/{name}", level="content").exit_code == 0
    assert not [path for path in s3.find("bucket") if "/.ckptool-upload" in path]
