"""Hostile and broken `.metadata`: refused before anything runs, with the class that gives the right exit code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.errors import CkptoolError, DamagedError, UnsafeError, UnsupportedError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.runs import find_latest, list_checkpoints

FILE_BYTES = 4096


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def good() -> Metadata:
    """A float32 tensor of 4 x 2 in two chunks, and an object."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 2])) for row in (0, 2)]
    places: dict[Any, Any] = {
        MetadataIndex("a", torch.Size([row, 0]), i): _StorageInfo("__0_0.distcp", 1000 * i, 1000)
        for i, row in enumerate((0, 2))
    }
    places[MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 2000, 100)
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 2]), chunks)
    entries = {"a": tensor, "step": BytesStorageMetadata()}
    return Metadata(entries, {"a": ("a",), "step": ("step",)}, places, StorageMeta("/writer/path"))


def put(folder: Path, metadata: Any, protocol: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(bytes(FILE_BYTES))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    return folder


def place(metadata: Metadata, fqn: str = "a") -> _StorageInfo:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


@pytest.mark.parametrize("protocol", range(6))
def test_the_good_one_is_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    manifest = read_manifest(put(tmp_path / "c", good(), protocol))
    assert manifest.tensors["a"].shape == (4, 2)
    assert [chunk.locator.offset for chunk in manifest.tensors["a"].chunks if chunk.locator] == [0, 1000]
    assert set(manifest.objects) == {"step"}


def evil_places(tmp_path: Path) -> list[Any]:
    """Metadata with `os.system` in every place where a value can stand."""
    call = Calls(os.system, f"touch {tmp_path}/ran")
    spots: list[Any] = [call, {"a": call}]
    for attribute in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
        metadata = good()
        setattr(metadata, attribute, call)
        spots.append(metadata)
    for change in (
        lambda m: m.state_dict_metadata["a"].chunks.append(call),
        lambda m: setattr(m.state_dict_metadata["a"], "size", call),
        lambda m: setattr(place(m), "relative_path", call),
        lambda m: m.planner_data.update(a=(call,)),
        lambda m: setattr(m.storage_meta, "checkpoint_id", call),
    ):
        metadata = good()
        change(metadata)
        spots.append(metadata)
    return spots


def test_code_is_never_run(tmp_path: Path) -> None:
    for i, metadata in enumerate(evil_places(tmp_path)):
        folder = put(tmp_path / f"step-{i}", metadata)
        with pytest.raises(UnsafeError, match=r"\.metadata wants to use \w+\.system") as caught:
            read_manifest(folder)
        assert caught.value.exit_code == 5
    assert find_latest(tmp_path) is None
    assert all("system" in summary.reason for summary in list_checkpoints(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "function", [eval, exec, getattr, __import__, torch.load, torch.hub.load, pickle.loads, os.popen, open]
)
def test_no_function_but_the_few_needed(tmp_path: Path, function: Callable[..., Any]) -> None:
    metadata = good()
    metadata.planner_data = Calls(function, "x")
    with pytest.raises((UnsafeError, DamagedError)):
        read_manifest(put(tmp_path / "c", metadata))


def with_place(**changes: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(place(metadata)).update(changes)


def with_tensor(**changes: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["a"]).update(changes)


def with_chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    """The chunks of `a` replaced, each stored somewhere."""

    def change(metadata: Metadata) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        metadata.state_dict_metadata["a"].chunks = chunks
        metadata.storage_data = {
            MetadataIndex("a", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 1000) for chunk in chunks
        } | {index: info for index, info in metadata.storage_data.items() if index.fqn == "step"}

    return change


def without(attribute: str, fqn: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        old = getattr(metadata, attribute)
        setattr(metadata, attribute, {k: v for k, v in old.items() if fqn not in (k, getattr(k, "fqn", None))})

    return change


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (with_place(relative_path="../secret"), UnsafeError, "outside its folder"),
        (with_place(relative_path="/etc/passwd"), UnsafeError, "outside its folder"),
        (with_place(relative_path="a/../../b"), UnsafeError, "outside its folder"),
        (with_place(relative_path="gone.distcp"), DamagedError, "a needs gone.distcp, which is not there"),
        (with_place(relative_path=5), DamagedError, "damaged storage record of 'a'"),
        (with_place(offset=FILE_BYTES - 10), DamagedError, "truncated"),
        (with_place(offset=-1), DamagedError, "a lies at -1"),
        (with_place(length=2**70), DamagedError, "truncated"),
        (with_place(offset=1.5), DamagedError, "damaged storage record"),
        (with_place(offset=True), DamagedError, "damaged storage record"),
        (with_place(length=8), DamagedError, "needs 16 bytes, but 8 are stored"),
        (with_place(transform_descriptors=["zstd"]), UnsupportedError, "zstd"),
        (with_tensor(size=torch.Size([4, 3])), DamagedError, "chunks cover 8 of 12"),
        (with_tensor(size=torch.Size([4])), DamagedError, "outside shape"),
        (with_tensor(size=(4, -2)), DamagedError, "impossible shape"),
        (with_tensor(size=[4, 2]), DamagedError, "impossible shape"),
        (with_tensor(size=(4, 2.0)), DamagedError, "impossible shape"),
        (with_tensor(chunks=None), DamagedError, "tensor a"),
        (with_tensor(properties=None), DamagedError, "tensor a"),
        (with_chunks(([0, 0], [2, 2]), ([1, 0], [3, 2])), DamagedError, "overlap"),
        (with_chunks(([0, 0], [4, 1]), ([0, 1], [3, 1])), DamagedError, "chunks cover 7 of 8"),
        (with_chunks(([0, 0], [2, 2])), DamagedError, "chunks cover 4 of 8"),
        (with_chunks(([0, 0], [4, 3])), DamagedError, "outside shape"),
        (without("storage_data", "step"), DamagedError, "does not say where step is stored"),
        (without("storage_data", "a"), DamagedError, r"the chunk at \[0, 0\] of a is stored"),
        (without("state_dict_metadata", "a"), DamagedError, "stored bytes for a"),
        (lambda m: setattr(m, "planner_data", {"a": "a"}), DamagedError, "planner data"),
        (lambda m: setattr(m, "storage_data", None), DamagedError, "where its bytes are"),
        (lambda m: m.state_dict_metadata.update(x=5), DamagedError, "x is neither"),
        (lambda m: m.state_dict_metadata.update({5: m.state_dict_metadata["a"]}), DamagedError, "not a string"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, change: Callable[[Metadata], None], kind: type[CkptoolError], says: str
) -> None:
    metadata = good()
    change(metadata)
    with pytest.raises(kind, match=says) as caught:
        read_manifest(put(tmp_path / "c", metadata))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_small_checkpoint_can_not_claim_a_huge_tensor(tmp_path: Path) -> None:
    metadata = good()
    row_bytes, num_rows = 256, 100_000
    chunks = [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, row_bytes])) for i in range(num_rows)]
    tensor = TensorStorageMetadata(TensorProperties(torch.uint8), torch.Size([num_rows, row_bytes]), chunks)
    metadata.state_dict_metadata["bomb"] = tensor
    same_place = _StorageInfo("__0_0.distcp", 0, FILE_BYTES)
    metadata.storage_data |= {MetadataIndex("bomb", chunk.offsets): same_place for chunk in chunks}
    with pytest.raises(DamagedError, match="more than all data files hold"):
        read_manifest(put(tmp_path / "c", metadata))


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "c", good())
    (tmp_path / "secret").write_bytes(bytes(FILE_BYTES))
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeError, match="link out of its folder"):
        read_manifest(folder)


def test_a_cut_or_flipped_file_is_never_an_unplanned_error(tmp_path: Path) -> None:
    folder = put(tmp_path / "c", good())
    raw = (folder / ".metadata").read_bytes()
    outcomes = set()
    for i in range(0, len(raw), 3):
        for broken in (raw[:i], raw[:i] + bytes([raw[i] ^ 0x55]) + raw[i + 1 :]):
            (folder / ".metadata").write_bytes(broken)
            try:
                read_manifest(folder)
                outcomes.add("read")
            except CkptoolError as error:
                outcomes.add(type(error).__name__)
    assert {"DamagedError", "UnsafeError"} <= outcomes <= {"read", "DamagedError", "UnsafeError", "UnsupportedError"}
