"""A resharded checkpoint has every byte of the first one, and each rank finds its own in its own file."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.cli._output import size
from ckptool.cli.main import run
from ckptool.core.box import Box
from ckptool.core.mesh import Mesh, Shard, split
from ckptool.errors import DamagedError, StorageError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.formats.dcp_source import DcpSource
from ckptool.ops.plan_reads import plan_reads
from ckptool.ops.reshard import reshard
from ckptool.planner import FILE_BUFFER_BYTES
from ckptool.storage.digests_file import read_digests
from tests.ops.conftest import Copy, trained_tensors

DP8, DP4, DP2 = (Mesh.of({"dp": size}) for size in (8, 4, 2))


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    source = DcpSource(folder)
    found = {}
    for fqn, entry in source.manifest.tensors.items():
        out = bytearray(entry.num_bytes)
        source.read_into(fqn, Box.whole(entry.shape), memoryview(out))
        found[fqn] = bytes(out)
    source.close()
    return found


def object_bytes(folder: Path) -> dict[str, bytes]:
    source = DcpSource(folder)
    found = {fqn: source.read_object(fqn) for fqn in source.manifest.objects}
    source.close()
    return found


def side_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.glob("hf/**/*") if p.is_file()}


@pytest.mark.parametrize("mesh", ["dp=3", "dp=1", "dp=12", "dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize("name", ["tiny", "moe", "sharded", "foreign"])
def test_everything_comes_along(kinds: Path, tmp_path: Path, name: str, mesh: str) -> None:
    before, after = kinds / name, tmp_path / "new"
    result = reshard(name, str(after), root=kinds, mesh=Mesh.parse(mesh))
    assert result.target == str(after) and os.listdir(tmp_path) == ["new"]
    assert tensor_bytes(after) == tensor_bytes(before)
    assert object_bytes(after) == object_bytes(before)
    assert side_files(after) == side_files(before)
    assert read_manifest(after).paths == read_manifest(before).paths
    assert read_manifest(after).ties == read_manifest(before).ties
    assert ckptool.verify(str(after), level="content").findings == ()
    assert plan_reads(str(after), mesh=Mesh.parse(mesh)).details["amplification"] == 1.0


@pytest.mark.parametrize(
    ("name", "mesh"), [("tiny", "dp_shard=2,tp=2"), ("moe", "dp_shard=2,tp=3"), ("moe", "dp=2,ep=2")]
)
def test_the_models_own_parallel_plan_is_followed(kinds: Path, tmp_path: Path, name: str, mesh: str) -> None:
    reshard(name, str(tmp_path / "new"), root=kinds, mesh=Mesh.parse(mesh))
    assert tensor_bytes(tmp_path / "new") == tensor_bytes(kinds / name)
    assert plan_reads(str(tmp_path / "new"), mesh=Mesh.parse(mesh)).details["amplification"] == 1.0
    tensors = read_manifest(tmp_path / "new").tensors
    if "ep" in mesh:
        experts = tensors["model.model.layers.0.mlp.experts.gate_up_proj"]
        assert {chunk.box.sizes[0] for chunk in experts.chunks} <= {1, 2}, "two axes cut 5 experts"
    else:
        down = tensors["model.model.layers.0.self_attn.o_proj.weight"]
        assert all(chunk.box.sizes[1] < down.shape[1] for chunk in down.chunks), "rowwise cuts columns"


@pytest.mark.parametrize("name", ["tiny", "sharded"])
def test_digests_stay_and_provenance_names_the_new_mesh(kinds: Path, tmp_path: Path, name: str) -> None:
    mesh = Mesh.parse("dp_replicate=2,dp_shard=3")
    reshard(name, str(tmp_path / "new"), root=kinds, mesh=mesh)
    before, after = read_manifest(kinds / name), read_manifest(tmp_path / "new")
    digests = [read_digests(Path(manifest.location), manifest.save_id) for manifest in (before, after)]
    assert digests[0] is not None and digests[1] is not None
    assert digests[0].tensors == digests[1].tensors
    assert before.provenance is not None and after.provenance is not None
    assert (after.provenance.world_size, after.provenance.mesh) == (6, {"dp_replicate": 2, "dp_shard": 3})
    for field in ("step", "source", "naming", "ties", "stored_tied_names", "untied"):
        assert getattr(after.provenance, field) == getattr(before.provenance, field)


def test_there_and_back_gives_the_first_checkpoint(kinds: Path, tmp_path: Path) -> None:
    first, small, last = (tmp_path / name for name in ("first", "small", "last"))
    reshard("sharded", str(first), root=kinds, mesh=DP8, rewrite=True)
    reshard(str(first), str(small), mesh=DP2, rewrite=True)
    reshard(str(small), str(last), mesh=DP8, rewrite=True)
    assert {p.name: p.read_bytes() for p in first.glob("*.distcp")} == {
        p.name: p.read_bytes() for p in last.glob("*.distcp")
    }
    assert read_manifest(first).tensors == read_manifest(last).tensors


WHOLE = '"whole"'


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> tuple[Mesh, str]:
    """A mesh of up to three axes, and a file of placements that cut any dims along them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(("dp", "x", "y")[: len(sizes)], tuple(sizes))
    tables = []
    for axis in mesh.axes:
        lines = [f"[{axis}]"]
        for name, shape in shapes.items():
            dim = draw(st.integers(-len(shape), len(shape) - 1))
            parts = 1 if axis == "dp" else draw(st.sampled_from([1, 1, 2, 3]))
            cut = f"{{ dim = {dim}, parts = {parts} }}"
            lines.append(f"{name} = {draw(st.sampled_from([cut, cut, WHOLE]))}")
        tables.append("\n".join(lines))
    return mesh, "\n".join(tables)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_mesh_to_any_other(data: st.DataObject) -> None:
    shapes = {f"t{i}": tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))) for i in range(3)}
    dtypes = [data.draw(st.sampled_from([torch.bfloat16, torch.int8, torch.float64, torch.complex128])) for _ in shapes]
    state = {name: torch.randn(s).mul(50).to(d) for (name, s), d in zip(shapes.items(), dtypes, strict=True)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptool.ops.reshard.PIECE_BYTES", data.draw(st.sampled_from([1, 64, 1 << 20])))
        root = Path(folder)
        dcp.save({"model": state}, checkpoint_id=root / "0", no_dist=True)
        for number in (1, 2):
            mesh, placements = data.draw(layouts(shapes))
            (root / "placements.toml").write_text(placements)
            before, after = str(root / str(number - 1)), str(root / str(number))
            reshard(before, after, mesh=mesh, placements=root / "placements.toml")
            assert tensor_bytes(Path(after)) == tensor_bytes(root / "0")
            assert ckptool.verify(after, level="content").findings == ()
            planned = plan_reads(after, mesh=mesh, placements=root / "placements.toml").details
            assert planned["read_bytes"] == planned["held_bytes"]


def test_each_rank_has_one_file_with_its_boxes(kinds: Path, tmp_path: Path) -> None:
    reshard("moe", str(tmp_path / "new"), root=kinds, mesh=DP4)
    manifest = read_manifest(tmp_path / "new")
    assert set(manifest.files) == {f"__{rank}_0.distcp" for rank in range(4)}
    for entry in manifest.tensors.values():
        holders = {held.boxes: held.ranks for held in split(entry.shape, DP4, (Shard(0),))}
        for chunk in entry.chunks:
            (rank,) = next(ranks for boxes, ranks in holders.items() if boxes[0].contains(chunk.box))
            assert chunk.locator is not None and chunk.locator.file == f"__{rank}_0.distcp"


def test_small_pieces_and_small_groups(kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_BYTES", "CHUNK_BYTES"):
        monkeypatch.setattr(f"ckptool.ops.reshard.{name}", 100)
    monkeypatch.setattr("ckptool.core.rank_files.MAX_GROUP_RANKS", 2)
    mesh = Mesh.parse("dp=3,tp=2")
    result = reshard(
        "sharded", str(tmp_path / "new"), root=kinds, mesh=mesh, placements=_columns(tmp_path, '"*layers*" = -1')
    )
    assert tensor_bytes(tmp_path / "new") == tensor_bytes(kinds / "sharded")
    assert set(read_manifest(tmp_path / "new").files) == {f"__{rank}_0.distcp" for rank in range(6)}
    assert result.plan is not None and result.plan.peak_bytes < result.plan.num_workers * (FILE_BUFFER_BYTES + 10_000)


def _columns(folder: Path, table: str) -> Path:
    file = folder / "placements.toml"
    file.write_text(f"[tp]\n{table}\n")
    return file


def test_columns_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(64.0 * 96).reshape(64, 96)
    dcp.save({"model": {"w": weight}}, checkpoint_id=tmp_path / "whole", no_dist=True)
    num_bytes = []
    read_into = DcpSource.read_into

    def count(self: DcpSource, fqn: str, box: Box, out: memoryview) -> None:
        num_bytes.append(len(out))
        read_into(self, fqn, box, out)

    monkeypatch.setattr(DcpSource, "read_into", count)
    reshard(
        str(tmp_path / "whole"),
        str(tmp_path / "new"),
        mesh=Mesh.parse("dp=2,tp=8"),
        placements=_columns(tmp_path, "w = 1"),
    )
    assert sum(num_bytes) == weight.nbytes
    state = {"model": {"w": torch.zeros_like(weight)}}
    dcp.load(state, checkpoint_id=tmp_path / "new", no_dist=True)
    assert torch.equal(state["model"]["w"], weight)


def save_even(folder: Path, **extra: object) -> None:
    torch.manual_seed(0)
    dcp.save({"model": {"w": torch.randn(16, 3), "s": torch.tensor(1.0)}, **extra}, checkpoint_id=folder, no_dist=True)


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("*.distcp")}


def test_chunks_that_fit_are_linked(tmp_path: Path) -> None:
    eight, four, written = (tmp_path / name for name in ("eight", "four", "written"))
    save_even(tmp_path / "one", step=3)
    assert reshard(str(tmp_path / "one"), str(eight), mesh=DP8).details["linked"] is False
    result = reshard(str(eight), str(four), mesh=DP4)
    assert result.details["linked"] is True and result.plan is not None and result.plan.write_bytes == 0
    assert inodes(four) == inodes(eight)
    assert tensor_bytes(four) == tensor_bytes(tmp_path / "one")
    assert ckptool.verify(str(four), level="content").findings == ()
    assert plan_reads(str(four), mesh=DP4).details["amplification"] == 1.0
    assert reshard(str(eight), str(written), mesh=DP4, rewrite=True).details["linked"] is False
    assert inodes(written).isdisjoint(inodes(eight))


def test_links_outlive_the_first_checkpoint(kinds: Path, copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("sharded")
    reshard(str(folder), str(tmp_path / "linked"), mesh=Mesh.of({"dp": 1}))
    for path in folder.glob("*.distcp"):
        path.unlink()
    assert tensor_bytes(tmp_path / "linked") == tensor_bytes(kinds / "sharded")
    assert read_manifest(tmp_path / "linked").provenance.world_size == 1  # type: ignore[union-attr]


def test_a_checkpoint_without_digests_is_linked_without_any(tmp_path: Path) -> None:
    save_even(tmp_path / "one", step=3)
    assert reshard(str(tmp_path / "one"), str(tmp_path / "new"), mesh=Mesh.of({"dp": 1})).details["linked"] is True
    assert not (tmp_path / "new" / "digests.json").exists()
    assert ckptool.verify(str(tmp_path / "new"), level="content").findings == ()
    assert tensor_bytes(tmp_path / "new") == tensor_bytes(tmp_path / "one")


def test_another_filesystem_gets_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.ops.reshard.can_link", lambda path, target: False)
    save_even(tmp_path / "one")
    assert reshard(str(tmp_path / "one"), str(tmp_path / "new"), mesh=Mesh.of({"dp": 1})).details["linked"] is False
    assert tensor_bytes(tmp_path / "new") == tensor_bytes(tmp_path / "one")


def test_a_filesystem_without_links_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    save_even(tmp_path / "one")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="can't have a second name: Operation not permitted") as caught:
        reshard(str(tmp_path / "one"), str(tmp_path / "new"), mesh=Mesh.of({"dp": 1}))
    assert caught.value.hint == "--rewrite writes files of its own" and os.listdir(tmp_path) == ["one"]


def test_states_of_ranks_that_are_gone_are_kept_and_said(tmp_path: Path) -> None:
    rng = {f"rank_{rank}": torch.full((40,), rank, dtype=torch.uint8) for rank in range(4)}
    save_even(tmp_path / "one", rng=rng, note={"rank_3": "x"})
    fewer = reshard(str(tmp_path / "one"), str(tmp_path / "two"), mesh=DP2)
    assert "entries of ranks 2, 3 are kept, but the mesh has no such rank to ask for them" in fewer.notes
    more = reshard(str(tmp_path / "one"), str(tmp_path / "eight"), mesh=DP8)
    assert "ranks 4, 5, 6, 7: no entries of their own, as other ranks have" in more.notes
    tensors = read_manifest(tmp_path / "eight").tensors
    for rank in range(4):
        (chunk,) = tensors[f"rng.rank_{rank}"].chunks
        assert chunk.locator is not None and chunk.locator.file == f"__{rank}_0.distcp"
    state = {"rng": {name: torch.zeros_like(value) for name, value in rng.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "two", no_dist=True)
    assert all(torch.equal(state["rng"][name], value) for name, value in rng.items())


def test_the_model_alone(kinds: Path, tmp_path: Path) -> None:
    reshard("sharded", str(tmp_path / "new"), root=kinds, mesh=DP2, model_only=True)
    before = {fqn: data for fqn, data in tensor_bytes(kinds / "sharded").items() if fqn.startswith("model.")}
    assert tensor_bytes(tmp_path / "new") == before
    assert object_bytes(tmp_path / "new") == {}
    assert side_files(tmp_path / "new") == side_files(kinds / "sharded")


def flip(folder: Path, fqn: str, at: int = 0) -> None:
    """Change one bit of the payload of a tensor's first chunk, or of an object."""
    manifest = read_manifest(folder)
    place = manifest.tensors[fqn].chunks[0].locator if fqn in manifest.tensors else manifest.objects[fqn].locator
    assert place is not None
    data = bytearray((folder / place.file).read_bytes())
    data[place.offset + at] ^= 1
    (folder / place.file).write_bytes(data)


@pytest.mark.parametrize("name", ["sharded", "foreign"])
@pytest.mark.parametrize("fqn", ["model.layers.0.up", "step"])
def test_a_changed_bit_is_noticed_and_nothing_published(copy_of: Copy, tmp_path: Path, name: str, fqn: str) -> None:
    folder = copy_of(name)
    manifest = read_manifest(folder)
    blob = manifest.tensors[fqn].chunks[0].locator if fqn in manifest.tensors else manifest.objects[fqn].locator
    assert blob is not None
    raw = (folder / blob.file).read_bytes()[blob.offset : blob.offset + blob.length]
    # The pickle for an object; for a tensor its payload, which torch aligns to 64 bytes.
    flip(folder, fqn, raw.index(b"data/0") + 128 if fqn in manifest.tensors else raw.index(b"\x80\x02") + 2)
    with pytest.raises(DamagedError):
        reshard(str(folder), str(tmp_path / "new"), mesh=Mesh.of({"dp": 3}))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("file", ["ckptool.json", "hf/config.json"])
def test_a_changed_side_file_is_noticed(copy_of: Copy, tmp_path: Path, file: str) -> None:
    folder = copy_of("sharded")
    (folder / file).write_text((folder / file).read_text() + " ")
    with pytest.raises(DamagedError, match=rf"{file} is not what digests\.json lists"):
        reshard(str(folder), str(tmp_path / "new"), mesh=Mesh.of({"dp": 3}))
    assert os.listdir(tmp_path) == ["sharded"]


def cli(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = run([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "say one of --world-size N and --mesh AXIS=N,..."),
        (["--world-size", "2", "--mesh", "dp=2"], 2, "say one of --world-size N and --mesh AXIS=N,..."),
        (["--world-size", "0"], 2, "0 is not in the range"),
        (["--mesh", "dp=2,dp=2"], 2, "the mesh has two axes named 'dp'"),
        (["--mesh", "dp=two"], 2, "'dp=two' is no mesh axis"),
        (["--mesh", "dp=1000000"], 2, "has 1000000 ranks"),
        (["--mesh", "dp=2,cp=2"], 2, "nothing says what mesh axis 'cp' cuts"),
        (["--mesh", "dp=2,tp=2"], 1, "has no config.json, so that its tp plan is not known"),
        (["--mesh", "dp=2,tp=2", "--placements", "gone.toml"], 2, "gone.toml"),
        (["--mesh", "dp=2,tp=2", "--placements", "[tp]\ncolumns = 1\nrows = 1"], 3, "'rows' names no parameter"),
        (["--mesh", "dp=2,tp=2", "--placements", "[tp]\ncolumns = 2"], 3, "cuts dim 2 of model.columns"),
        (["--mesh", "dp=2", "--placements", "[tp]\ncolumns = 1"], 2, "placements for tp, which is no axis"),
        (["--mesh", "dp=2,tp=2", "--placements", "tp = 1"], 4, "tp is no table"),
        (["--mesh", "dp=2,tp=2", "--placements", "[tp"], 4, "not TOML"),
        (["--mesh", "dp=2,tp=2", "--placements", '[tp]\ncolumns = "dim 1"'], 4, "is no placement"),
        (["--mesh", "dp=2,tp=2", "--placements", "[tp]\ncolumns = { dim = 1, parts = 0 }"], 4, "is no placement"),
    ],
)
def test_bad_input_is_one_line(
    kinds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    if "--placements" in options and "gone" not in options[-1]:
        (tmp_path / "placements.toml").write_text(options[-1])
        options = [*options[:-1], str(tmp_path / "placements.toml")]
    found, out, err = cli(capsys, "reshard", "foreign", tmp_path / "new", "--root", kinds, *options)
    assert (found, out) == (code, "")
    (line,) = [line for line in err.splitlines() if line.lower().startswith("error: ")]
    assert message in line
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


def test_a_checkpoint_with_holes_is_refused(copy_of: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of("sharded")
    (folder / "__1_0.distcp").unlink()
    code, _, err = cli(capsys, "reshard", folder, tmp_path / "new", "--world-size", 3)
    assert code == 4 and "__1_0.distcp, which is not there" in err
    assert os.listdir(tmp_path) == ["sharded"]


def test_dry_run_json_quiet_and_overwrite(kinds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("reshard", "foreign", tmp_path / "new", "--root", kinds, "--world-size", 3)
    code, out, _ = cli(capsys, *args, "--dry-run")
    assert code == 0 and "reshard would do this (nothing was written)" in out and os.listdir(tmp_path) == []
    code, out, _ = cli(capsys, *args, "--json")
    record = json.loads(out)
    assert (code, record["world_size"], record["mesh"], record["linked"]) == (0, 3, {"dp": 3}, False)
    assert cli(capsys, *args)[0] == 6
    assert cli(capsys, *args, "--overwrite", "--quiet") == (0, f"{tmp_path / 'new'}\n", "")
    code, _, err = cli(capsys, "reshard", tmp_path / "new", tmp_path / "new", "--overwrite", "--world-size", 2)
    assert code == 2 and "can't be overwritten" in err


def test_plan_says_what_ranks_read(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {name: tensor.nbytes for name, tensor in trained_tensors().items()}
    # Every rank holds the scalar; rank 3 has no row of the embedding's 9 and the columns' 6, and reads nothing of them.
    held = sum(sizes.values()) + 3 * sizes["scale"]
    read = 4 * sum(sizes.values()) - sizes["embed"] - sizes["columns"]
    args = ("plan", "foreign", "--root", kinds, "--world-size", 4)
    code, out, _ = cli(capsys, *args)
    assert code == 0 and f"4 ranks hold {held} B and read {size(read)}, {read / held:.2f} times as much" in out
    record = json.loads(cli(capsys, *args, "--json")[1])
    assert (record["held_bytes"], record["read_bytes"]) == (held, read)
    assert sum(rank["files"]["__0_0.distcp"] for rank in record["ranks"]) == read
    assert "ckptool reshard foreign NEW --mesh dp=4 makes that 1.00" in out
    assert cli(capsys, *args, "--quiet")[1] == f"{round(read / held, 4)}\n"
    assert cli(capsys, "plan", "foreign", "--root", kinds)[0] == 2
