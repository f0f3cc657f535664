"""Small runs of everything that publishes, and what a reader finds afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.core.box import Box
from ckptool.core.data_source import DataSource
from ckptool.core.mesh import Mesh
from ckptool.core.position import DataPosition
from ckptool.errors import DamagedError
from ckptool.formats import dcp_sink
from ckptool.formats.dcp_source import DcpSource
from ckptool.ops.data_edit import write_position
from ckptool.ops.reshard import reshard
from ckptool.storage import staging
from ckptool.storage.digest import digest_box, digest_file
from ckptool.storage.digests_file import read_digests

NAME = "step-5"


@dataclass(frozen=True)
class Scenario:
    """`prepare` makes the state before, `run` publishes `NAME` under the root; neither depends on the time."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]


def save(root: Path, value: float, overwrite: bool = False) -> None:
    state = {
        "model": {"a": torch.full((40, 3), value), "b": torch.arange(20).bfloat16() + value},
        "step": int(value),
        "data": {"cursor": torch.arange(8), "record": "{}"},
    }
    ckptool.save(
        state,
        root / NAME,
        provenance=ckptool.Provenance("0", step=int(value), ties={"c": "a"}),
        ties={"model.c": "model.a"},
        side_folder=root / "model",
        position={"consumed": int(value)},
        overwrite=overwrite,
    )


def make_model(root: Path) -> None:
    (root / "model").mkdir(parents=True)
    (root / "model" / "tokenizer.json").write_text('{"a": 1}')
    weights = {"a": torch.arange(60.0).reshape(20, 3), "b": torch.ones(7, dtype=torch.bfloat16)}
    save_file(weights, root / "model" / "model.safetensors")


def make_wide_model(root: Path) -> None:
    make_model(root)
    save_file({f"w{i}": torch.full((5, 2), float(i)) for i in range(16)}, root / "model" / "model.safetensors")


def make_checkpoint(root: Path) -> None:
    make_model(root)
    ckptool.import_hf(str(root / "model"), "base", root=root)


def make_old(root: Path) -> None:
    make_model(root)
    save(root, 1.0)


def import_it(root: Path) -> None:
    ckptool.import_hf(str(root / "model"), str(root / NAME), chunk_bytes=60)


def export_it(root: Path) -> None:
    ckptool.export("base", root=root, out=root / NAME)


def export_file(root: Path) -> None:
    ckptool.export("base", root=root, out=root / NAME, to="torch")


def reshard_it(root: Path) -> None:
    reshard("base", str(root / NAME), root=root, mesh=Mesh.of({"dp": 3}), rewrite=True)


def reshard_by_links(root: Path) -> None:
    reshard("base", str(root / NAME), root=root, mesh=Mesh.of({"dp": 1}))


def move_the_data_position(root: Path) -> None:
    source = DataSource("text", 100)
    position = DataPosition.begin([source], seq_len=4, seed=0, global_batch_size=2).advance()
    write_position(root / NAME, position)


def replace_without_swapping(root: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, staging, "exchange", staging.exchange)
        staging.exchange = lambda a, b: False  # a filesystem that can't
        save(root, 2.0, overwrite=True)


def import_in_many_files(root: Path) -> None:
    """What is done when it is interrupted is found, and kept, by the next attempt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_sink, "_MIN_FILE_BYTES", 1)
        ckptool.import_hf(str(root / "model"), str(root / NAME), chunk_bytes=60, num_workers=2)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("import", make_model, import_it),
        Scenario("import in many files", make_wide_model, import_in_many_files),
        Scenario("export", make_checkpoint, export_it),
        Scenario("export to a file", make_checkpoint, export_file),
        Scenario("reshard", make_checkpoint, reshard_it),
        Scenario("reshard by links", make_checkpoint, reshard_by_links),
        Scenario("save", make_model, lambda root: save(root, 2.0)),
        Scenario("overwrite", make_old, lambda root: save(root, 2.0, overwrite=True)),
        Scenario("data position", make_old, move_the_data_position),
        Scenario("overwrite without swapping", make_old, replace_without_swapping),
    )
}


def state_of(root: Path) -> str:
    """What `NAME` holds, read whole and checked in every way; "absent" when there is nothing under that name."""
    ckptool.list_checkpoints(root)  # as any command would look, which puts an interrupted replacement right
    path = root / NAME
    if not path.exists():
        return "absent"
    if path.is_dir() and (path / ".metadata").exists():
        return str(sorted(read_checked(path).items()))
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return str([(file.relative_to(root).as_posix(), digest_file(file)) for file in files])


def read_checked(path: Path) -> dict[str, str]:
    """The digest of every tensor as it is read, all of them and all files having been held against digests.json."""
    with contextlib.closing(DcpSource(path)) as source:
        manifest = source.manifest
        digests = read_digests(path, manifest.save_id)
        if digests is None:
            raise DamagedError(f"{path} has no digests")
        for name, recorded in digests.files.items():
            if not (path / name).is_file() or digest_file(path / name) != recorded.blake3:
                raise DamagedError(f"{path / name} has changed")
        found = {}
        for fqn, entry in manifest.tensors.items():
            whole = Box.whole(entry.shape)
            data = memoryview(bytearray(entry.num_bytes))
            source.read_into(fqn, whole, data)
            recorded_tensor = digests.tensors[manifest.ties.get(fqn, fqn)]
            if recorded_tensor.digest != digest_box(data, whole, entry.shape, entry.itemsize_bytes):
                raise DamagedError(f"{path}: {fqn} has changed")
            found[fqn] = str(recorded_tensor.digest)
        for fqn in manifest.objects:
            source.load_object(fqn)
    return found
