"""Digests made while writing: the same for a tensor however it was sharded, and true of every file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ckptool
from ckptool.errors import DamagedError
from ckptool.storage.digest import digest_file, digest_run
from ckptool.storage.digests_file import Digests, FileDigest, read_digests
from ckptool.storage.hashing import HashingFile
from tests.spawn import run_ranks

PLACEMENTS: dict[str, Placement] = {"columns": Shard(1), "bias": Replicate(), "cube": Shard(2)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {
        "rows": torch.randn(7, 5, generator=generator),
        "one": torch.randn(1, 3, generator=generator),
        "columns": torch.randn(6, 7, generator=generator).bfloat16(),
        "cube": torch.randn(3, 2, 5, generator=generator).bfloat16(),
        "bias": torch.randn(5, generator=generator).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    return made | {"plain": torch.arange(9, dtype=torch.int32)}


def save(rank: int, folder: Path, world_size: int) -> None:
    state = tensors()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for name in ("rows", "one", "columns", "cube", "bias"):
            state[name] = distribute_tensor(state[name], mesh, [PLACEMENTS.get(name, Shard(0))])
    ckptool.save(
        {"model": state, "step": 3},
        folder,
        provenance=ckptool.Provenance("0", ties={"head": "rows"}),
        ties={"model.head": "model.rows"},
        position={"consumed": 1},
    )


def digests_of(folder: Path) -> Digests:
    digests = read_digests(folder, ckptool.open_checkpoint(folder).save_id)
    assert digests is not None
    return digests


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    save_file(tensors(), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("digests")
    save(0, base / "ranks-1", 1)
    for world_size in (2, 3):
        run_ranks(world_size, save, base / f"ranks-{world_size}", world_size)
    ckptool.import_hf(str(model_folder(base / "source")), "import", root=base, chunk_bytes=40)
    ckptool.export("import", root=base, out=base / "out")
    ckptool.import_hf(str(base / "out"), "again", root=base)
    return base


def test_a_tensors_digest_does_not_depend_on_who_wrote_it(base: Path) -> None:
    expected = digests_of(base / "import").tensors
    assert {fqn.removeprefix("model.") for fqn in expected} == set(tensors())
    for name in ("ranks-1", "ranks-2", "ranks-3", "again"):
        assert digests_of(base / name).tensors == expected, name
    for name, tensor in tensors().items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        record = expected[f"model.{name}"]
        assert record.digest == digest_run(memoryview(raw), 0), name
        assert (record.dtype, record.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.mark.parametrize("name", ["ranks-1", "ranks-3", "import", "again"])
def test_every_file_is_listed_with_its_true_digest(base: Path, name: str) -> None:
    folder = base / name
    files = {
        path.relative_to(folder).as_posix(): FileDigest(path.stat().st_size, digest_file(path))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".metadata", "digests.json")
    }
    assert "ckptool.json" in files and any(file.endswith(".distcp") for file in files)
    assert digests_of(folder).files == files


def test_other_digests_are_not_believed(base: Path) -> None:
    save_id = ckptool.open_checkpoint(base / "ranks-2").save_id
    with pytest.raises(DamagedError, match="changed or replaced"):
        read_digests(base / "ranks-1", save_id)


def test_a_hashing_file_hashes_what_it_writes(tmp_path: Path) -> None:
    pieces = [b"abc", bytes(range(256)) * 40_000, memoryview(b"xyz"), bytearray(b"1234") * 100_000]
    file = HashingFile(tmp_path / "f")
    assert [file.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
    assert file.fileno() > 2
    file.close()
    assert file.tell() == (tmp_path / "f").stat().st_size == sum(map(len, pieces))
    assert (tmp_path / "f").read_bytes() == b"".join(bytes(piece) for piece in pieces)
    assert file.digest().blake3 == blake3((tmp_path / "f").read_bytes()).hexdigest()


@pytest.mark.parametrize("num_bytes", [3, 1 << 20, 20 << 20])
def test_a_hashing_file_passes_errors_on_at_the_latest_when_closed(tmp_path: Path, num_bytes: int) -> None:
    file = HashingFile(tmp_path / "f")
    os.close(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(bytes(num_bytes))
        file.close()
    file.abandon()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("kept")
    with pytest.raises(FileExistsError):
        HashingFile(tmp_path / "f")
    assert (tmp_path / "f").read_text() == "kept"
