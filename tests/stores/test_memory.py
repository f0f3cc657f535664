"""Every command on URLs, with the store in memory."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, NotFoundError, StorageError, TargetExistsError, UnsupportedError, UsageError
from ckptool.ops.copy import copy
from ckptool.ops.inspect import inspect
from ckptool.ops.layouts import chosen_mesh
from ckptool.ops.ls import ls
from ckptool.ops.pin import pin
from ckptool.ops.reshard import reshard
from ckptool.storage import store
from ckptool.storage.place import place
from ckptool.storage.store import Store

RUNS = "memory://bucket/runs"
Memory = fsspec.AbstractFileSystem


def names(memory: Memory, folder: str) -> set[str]:
    return {path.removeprefix(f"{folder}/") for path in memory.find(folder)}


def test_a_model_comes_from_a_store_as_from_a_disk(memory: Memory, root: Path, tmp_path: Path) -> None:
    ckptool.import_hf("memory://bucket/tiny", "m", root=tmp_path)
    assert ckptool.diff(str(tmp_path / "m"), str(root / "step-5")).equal
    assert (tmp_path / "m" / "hf" / "assets" / "notes.bin").read_bytes() == bytes(range(256))
    record = json.loads((tmp_path / "m" / "ckptool.json").read_text())
    assert record["source"]["url"] == "memory://bucket/tiny"


def test_from_store_to_store_and_back(memory: Memory, hub_folder: Path) -> None:
    ckptool.import_hf("memory://bucket/tiny", root=place(RUNS))
    assert ckptool.verify(f"{RUNS}/tiny", level="content", against=str(hub_folder)).exit_code == 0
    ckptool.export(f"{RUNS}/tiny", max_shard_bytes=40_000)
    assert names(memory, "/bucket/runs/tiny-hf") >= {"config.json", "model.safetensors.index.json"}
    assert ckptool.diff(f"{RUNS}/tiny-hf", str(hub_folder)).equal


def test_a_torch_file_goes_to_a_store(memory: Memory, root: Path, tmp_path: Path) -> None:
    ckptool.export(str(root / "step-5"), to="torch", out=place("memory://bucket/all.pt"))
    ckptool.export(str(root / "step-5"), to="torch", out=tmp_path / "all.pt")
    assert memory.cat("/bucket/all.pt") == (tmp_path / "all.pt").read_bytes()


def test_a_reshard_reads_and_writes_a_store(memory: Memory, root: Path) -> None:
    copy(str(root / "step-5"), f"{RUNS}/step-5")
    reshard("step-5", "two", mesh=chosen_mesh(2, None), root=place(RUNS))
    assert ckptool.verify(f"{RUNS}/two", level="content", against=str(root / "step-5")).exit_code == 0


def test_a_copy_has_every_byte(memory: Memory, root: Path, tmp_path: Path) -> None:
    copy("step-5", f"{RUNS}/step-5", root=root)
    copy("step-5", str(tmp_path / "back"), root=place(RUNS))
    for path in (root / "step-5").rglob("*"):
        if path.is_file():
            assert (tmp_path / "back" / path.relative_to(root / "step-5")).read_bytes() == path.read_bytes()


def test_a_listing_says_what_is_whole(memory: Memory, root: Path) -> None:
    copy("step-5", f"{RUNS}/step-5", root=root)
    memory.pipe("/bucket/runs/step-7/__0_0.distcp", b"half")
    rows = {row["name"]: row for row in ls(place(RUNS)).details["checkpoints"]}
    assert rows["step-5"]["complete"] and not rows["step-7"]["complete"]
    assert inspect("latest", root=place(RUNS)).target == f"{RUNS}/step-5"


def test_the_marker_is_written_last(memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []
    original = Store.put

    def watched(self: Store, name: str, path: Path) -> Any:
        put.append(name)
        return original(self, name, path)

    monkeypatch.setattr(Store, "put", watched)
    copy("step-5", f"{RUNS}/step-5", root=root)
    assert put[-1] == ".metadata" and put.count(".metadata") == 1


def test_a_second_attempt_goes_on_from_the_first(memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True
    sent: list[str] = []
    original = Store.put

    def put(self: Store, name: str, path: Path) -> Any:
        if broken and name.startswith("model-00002"):
            raise StorageError("no more")
        if name.startswith("model-"):
            sent.append(name)
        return original(self, name, path)

    monkeypatch.setattr(Store, "put", put)
    arguments = {"out": place("memory://bucket/out"), "max_shard_bytes": 40_000, "num_workers": 1}
    with pytest.raises(StorageError, match="no more") as raised:
        ckptool.export(str(root / "step-5"), **arguments)
    assert "goes on from where this one stopped" in raised.value.hint
    assert not memory.exists("/bucket/out/config.json")
    broken = False
    result = ckptool.export(str(root / "step-5"), **arguments)
    assert any("went on from an interrupted attempt" in note for note in result.notes)
    assert sent.count("model-00001-of-00003.safetensors") == 1
    assert ckptool.diff("memory://bucket/out", "memory://bucket/tiny").equal
    assert not any(name.startswith(".") for name in names(memory, "/bucket/out"))


def test_a_copy_goes_on_from_what_is_there(memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True
    sent: list[str] = []
    original = Store.put

    def put(self: Store, name: str, path: Path) -> Any:
        if broken and name == ".metadata":
            raise StorageError("no more")
        sent.append(name)
        return original(self, name, path)

    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(StorageError, match="no more"):
        copy("step-5", f"{RUNS}/step-5", root=root)
    broken = False
    copy("step-5", f"{RUNS}/step-5", root=root)
    assert sent.count("__0_0.distcp") == 1
    assert ckptool.verify(f"{RUNS}/step-5").exit_code == 0


def test_what_is_there_is_only_replaced_on_demand(memory: Memory, root: Path) -> None:
    copy("step-5", f"{RUNS}/step-5", root=root)
    memory.pipe("/bucket/runs/step-5/old.distcp", b"of the old one")
    with pytest.raises(TargetExistsError, match="already exists"):
        copy("step-5", f"{RUNS}/step-5", root=root)
    copy("step-5", f"{RUNS}/step-5", root=root, overwrite=True)
    assert "old.distcp" not in names(memory, "/bucket/runs/step-5")
    memory.pipe("/bucket/notes/today.txt", b"mine")
    with pytest.raises(TargetExistsError, match="without a model"):
        copy("step-5", "memory://bucket/notes", root=root, overwrite=True)
    assert memory.cat("/bucket/notes/today.txt") == b"mine"


def test_a_file_that_changes_under_the_reader_is_an_error(memory: Memory) -> None:
    source = Store("memory://bucket/tiny")
    num_bytes = source.file("config.json").num_bytes
    memory.pipe("/bucket/tiny/config.json", bytes(num_bytes))
    with pytest.raises(DamagedError, match="changed while it was read"):
        source.read_into("config.json", 0, memoryview(bytearray(num_bytes)))


def test_another_writer_is_noticed_before_the_marker(
    memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.refresh

    def refresh(self: Store) -> Any:
        memory.pipe("/bucket/runs/step-5/__0_0.distcp", b"another's")
        return original(self)

    monkeypatch.setattr(Store, "refresh", refresh)
    with pytest.raises(StorageError, match="does something else write"):
        copy("step-5", f"{RUNS}/step-5", root=root)
    assert not memory.exists("/bucket/runs/step-5/.metadata")


def test_a_store_that_garbles_is_noticed(memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(memory).put_file

    def put_file(self: Any, lpath: str, rpath: str, **kwargs: Any) -> None:
        original(self, lpath, rpath, **kwargs)
        if rpath.endswith(".distcp"):
            self.store[rpath].getbuffer()[100] ^= 1

    monkeypatch.setattr(type(memory), "put_file", put_file)
    with pytest.raises(StorageError, match="does not read back"):
        copy("step-5", f"{RUNS}/step-5", root=root)
    assert not memory.exists("/bucket/runs/step-5/.metadata")


def test_what_is_not_in_a_store_or_works_on_folders_only_says_so(
    memory: Memory, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "seek", f"{RUNS}/step-9", "--to", "+1"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: no checkpoint {RUNS}/step-9",
        f"hint: ckptool ls {RUNS} shows what is there",
    ]
    copy("step-5", f"{RUNS}/step-5", root=root)
    assert run(["data", "import", f"{RUNS}/step-5", "--from", "torchtitan"]) == 1
    assert "works on local folders only" in capsys.readouterr().err


def test_a_root_in_a_store_is_pruned(memory: Memory, root: Path) -> None:
    for step in (1, 2, 3, 4):
        copy("step-5", f"{RUNS}/step-{step}", root=root)
    memory.pipe("/bucket/runs/step-9/__0_0.distcp", b"on its way")
    pin("step-1", root=place(RUNS), reason="paper")
    assert [row["pinned"] for row in ls(place(RUNS)).details["checkpoints"]] == ["paper", *[None] * 4]
    removed: list[str] = []
    original = Store.remove

    def remove(self: Store, name: str) -> None:
        removed.append(name)
        original(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "remove", remove)
        result = ckptool.prune(place(RUNS), keep_last=1, keep_every=3, stale=True)
    assert result.details["removed"] == ["step-2"] and removed[0] == "step-2/.metadata"
    assert {name.split("/")[0] for name in names(memory, "/bucket/runs")} == {
        ".pins",
        *(f"step-{n}" for n in (1, 3, 4, 9)),
    }
    pin("step-1", root=place(RUNS), remove=True)
    with pytest.raises(NotFoundError, match="not pinned"):
        pin("step-1", root=place(RUNS), remove=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptool.ops.prune.UPLOAD_SILENCE_SECONDS", 0)
        result = ckptool.prune(place(RUNS), keep_last=1, stale=True)
    assert set(result.details["removed"]) == {"step-1", "step-3", "step-9"}
    assert {name.split("/")[0] for name in names(memory, "/bucket/runs")} == {"step-4"}


def test_half_of_one_is_no_checkpoint_and_the_next_prune_finishes_what_a_killed_one_began(
    memory: Memory, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        copy("step-5", f"{RUNS}/step-{step}", root=root)
    original = Store.remove

    def remove_and_die(self: Store, name: str) -> None:
        if name == "step-1/ckptool.json":
            raise KeyboardInterrupt
        original(self, name)

    monkeypatch.setattr(Store, "remove", remove_and_die)
    with pytest.raises(KeyboardInterrupt):
        ckptool.prune(place(RUNS), keep_last=1)
    monkeypatch.undo()
    assert not memory.exists("/bucket/runs/step-1/.metadata") and memory.exists("/bucket/runs/step-1/ckptool.json")
    assert [s.name for s in ckptool.list_checkpoints(place(RUNS)) if s.complete] == ["step-2"]
    assert ckptool.prune(place(RUNS), keep_last=1).details["removed"] == ["step-1"]
    assert {name.split("/")[0] for name in names(memory, "/bucket/runs")} == {"step-2"}


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("foo://bucket/x", UsageError, "not a kind of URL"),
        ("gs://bucket/x", UnsupportedError, "driver for gs:// is not installed"),
        ("https://host/x?X-Amz-Signature=abc", UsageError, "a signed URL names one file"),
    ],
)
def test_urls_that_can_t_be_used(url: str, error: type[Exception], message: str) -> None:
    if url.startswith("gs"):
        try:
            import gcsfs  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("gcsfs is installed")
    with pytest.raises(error, match=message):
        inspect(url)


def test_credentials_are_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("sftp://me:hunter2@host/x", "https://me:hunter2@127.0.0.1:9/x", "https://host/x?sig=hunter2"):
        assert store.redact_url(url).count("hunter2") == 0
    run(["inspect", "foo://me:hunter2@host/x?key=hunter2"])
    run(["ls", "https://me:hunter2@host/x?key=hunter2"])
    captured = capsys.readouterr()
    assert captured.err.count("***") >= 2
    assert "hunter2" not in captured.out + captured.err


def test_torch_s_own_load_reads_a_store_and_its_save_is_told_what_does(memory: Memory, root: Path) -> None:
    copy("step-5", f"{RUNS}/step-5", root=root)
    fqn, entry = next((f, t) for f, t in ckptool.open_checkpoint(root / "step-5").tensors.items() if len(t.shape) == 2)
    state = {fqn: torch.zeros(entry.shape, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=ckptool.StorageReader(f"{RUNS}/step-5"), no_dist=True)
    assert state[fqn].any()
    with pytest.raises(UnsupportedError, match=r"memory://\*\*\*@bucket/x: StorageWriter writes to folders only"):
        ckptool.StorageWriter("memory://me:hunter2@bucket/x")


def test_a_load_asks_for_a_large_tensor_all_at_once_and_for_nothing_twice(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {f"t{i}": torch.rand(12 << 20) for i in range(2)}
    ckptool.save(stored, tmp_path / "c", provenance=ckptool.Provenance("0"))
    memory.put(str(tmp_path / "c") + "/", "/bucket/c/", recursive=True)
    asked: list[int] = []
    at_a_time: list[int] = []
    lock = threading.Lock()
    original = Store._read_into

    def counted(self: Store, name: str, known: Any, offset_bytes: int, out: memoryview, *more: Any) -> None:
        with lock:
            asked.append(len(out))
            at_a_time.append((at_a_time[-1] if at_a_time else 0) + 1)
        time.sleep(0.02)
        original(self, name, known, offset_bytes, out, *more)
        with lock:
            at_a_time.append(at_a_time[-1] - 1)

    monkeypatch.setattr(Store, "_read_into", counted)
    state = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    ckptool.load(state, "memory://bucket/c")
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    num_bytes = sum(tensor.nbytes for tensor in stored.values())
    assert num_bytes < sum(asked) < num_bytes + (1 << 20)
    assert max(at_a_time) > 4
