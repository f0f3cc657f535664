"""Checkpoints written by DcpSink are read by torch's own tools, and by ours."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptool.core.box import Box
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.parts import FileRecord, Part
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.formats.dcp_sink import DcpSink
from ckptool.formats.dcp_source import DcpSource

EVERY_DTYPE = sorted(name for name in ITEMSIZE_BYTES if hasattr(torch, name))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def make_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, and the odd shapes."""
    tensors = {}
    for name in EVERY_DTYPE:
        raw = torch.arange(6 * 4 * ITEMSIZE_BYTES[name], dtype=torch.uint8)
        raw = raw % 2 if name == "bool" else raw
        tensors[f"model.{name}"] = raw.view(getattr(torch, name)).reshape(6, 4)
    tensors["model.scalar"] = torch.tensor(3.5)
    tensors["model.empty"] = torch.empty(0, 3, dtype=torch.bfloat16)
    tensors["model.vector"] = torch.arange(10, dtype=torch.int64)
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], max_rows: int, num_files: int = 1) -> None:
    """The boxes are dealt to the files in turn."""
    folder.mkdir()
    entries = {
        fqn: TensorEntry(fqn, str(t.dtype).removeprefix("torch."), tuple(t.shape), ()) for fqn, t in tensors.items()
    }
    paths: dict[str, tuple[str | int, ...]] = {fqn: ("model", fqn.removeprefix("model.")) for fqn in tensors}
    sink = DcpSink(folder, entries, paths | {"step": ("step",)}, {"model.alias": "model.float32"})
    writers = [sink.open(Part((f"__0_{i}.distcp",), ())) for i in range(num_files)]
    turns = itertools.cycle(writers)
    blob = io.BytesIO()
    torch.save(7, blob)
    writers[0].write_object("step", blob.getvalue())
    for fqn, tensor in tensors.items():
        for box in Box.whole(tensor.shape).split_rows(max_rows):
            rows = tensor[box.offsets[0] : box.ends[0]] if tensor.ndim else tensor
            writer = next(turns)
            for piece in box.split(3):
                part = rows[piece.offsets[0] - box.offsets[0] :][: piece.sizes[0]] if tensor.ndim else rows
                part = part[:, piece.offsets[1] : piece.ends[1]] if tensor.ndim > 1 else part
                writer.write(fqn, box, piece, memoryview(bytearray(bytes_of(part))))
    sink.finish([record for writer in writers for record in writer.close()])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder, tensors = tmp_path_factory.mktemp("sink") / "ckpt", make_tensors()
    write_checkpoint(folder, tensors, max_rows=4, num_files=3)
    return folder, tensors


def test_stock_load_reads_every_dtype_and_shape(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = checkpoint
    state = {"model": {fqn.removeprefix("model."): torch.zeros_like(t) for fqn, t in tensors.items()}, "step": 0}
    state["model"]["alias"] = torch.zeros(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 7
    for fqn, tensor in tensors.items():
        assert bytes_of(state["model"][fqn.removeprefix("model.")]) == bytes_of(tensor), fqn
    assert bytes_of(state["model"]["alias"]) == bytes_of(tensors["model.float32"])


def test_dcp_to_torch_save_reads_it(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = checkpoint
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert state["step"] == 7
    assert set(state["model"]) == {fqn.removeprefix("model.") for fqn in tensors} | {"alias"}
    for fqn, tensor in tensors.items():
        assert bytes_of(state["model"][fqn.removeprefix("model.")]) == bytes_of(tensor), fqn


def test_our_source_reads_it_back(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = checkpoint
    source = DcpSource(folder)
    for fqn, tensor in tensors.items():
        out = bytearray(len(bytes_of(tensor)))
        source.read_into(fqn, Box.whole(tensor.shape), memoryview(out))
        assert bytes(out) == bytes_of(tensor), fqn
    assert source.load_object("step") == 7
    assert source.manifest.ties == {"model.alias": "model.float32"}
    source.close()


def test_metadata_names_no_path_of_the_writer(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = checkpoint
    assert str(folder.parent).encode() not in (folder / ".metadata").read_bytes()
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.version == "1.0.0"
    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id is None
    assert len({info.relative_path for info in metadata.storage_data.values()}) > 1
    assert metadata.planner_data["model.alias"] == ("model", "alias")


def test_metadata_is_what_stock_save_writes(tmp_path: Path) -> None:
    tensors = {"model.a": torch.arange(12.0).reshape(3, 4), "model.s": torch.tensor(2, dtype=torch.int32)}
    write_checkpoint(tmp_path / "ours", tensors | {"model.float32": torch.ones(2)}, 100)
    state = {"model": {fqn.removeprefix("model."): t for fqn, t in tensors.items()}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    ours = pickle.loads((tmp_path / "ours" / ".metadata").read_bytes())
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    for fqn in tensors:
        assert ours.state_dict_metadata[fqn] == stock.state_dict_metadata[fqn]
        assert ours.planner_data[fqn] == stock.planner_data[fqn]
    assert {i for i in ours.storage_data if i.fqn in tensors} == set(stock.storage_data)
    lengths = [{i.fqn: info.length for i, info in m.storage_data.items() if i.fqn in tensors} for m in (ours, stock)]
    assert lengths[0] == lengths[1]


def test_a_tensor_not_wholly_written_is_refused(tmp_path: Path) -> None:
    entry = TensorEntry("model.a", "uint8", (4, 2), ())
    sink = DcpSink(tmp_path, {"model.a": entry}, {}, {})
    writer = sink.open(Part(("__0_0.distcp",), ()))
    box = Box((0, 0), (3, 2))
    writer.write("model.a", box, box, memoryview(bytearray(6)))
    with pytest.raises(MismatchError, match=r"model\.a was not written as planned: chunks cover 6 of 8 elements"):
        sink.finish(writer.close())
    assert not (tmp_path / ".metadata").exists()


def test_a_chunk_left_unfinished_is_refused(tmp_path: Path) -> None:
    sink = DcpSink(tmp_path, {"model.a": TensorEntry("model.a", "uint8", (4, 2), ())}, {}, {})
    writer = sink.open(Part(("__0_0.distcp",), ()))
    writer.write("model.a", Box((0, 0), (4, 2)), Box((0, 0), (1, 2)), memoryview(bytearray(2)))
    with pytest.raises(MismatchError, match="not written whole"):
        writer.close()


def test_records_survive_the_journal(tmp_path: Path) -> None:
    sink = DcpSink(tmp_path, {"model.a": TensorEntry("model.a", "uint8", (4, 2), ())}, {}, {})
    writer = sink.open(Part(("__0_0.distcp",), ()))
    writer.write_object("step", b"blob")
    writer.write("model.a", Box((0, 0), (4, 2)), Box((0, 0), (4, 2)), memoryview(bytearray(8)))
    (record,) = writer.close()
    assert FileRecord.from_json(json.loads(json.dumps(record.to_json()))).to_json() == record.to_json()
    assert record.num_bytes == (tmp_path / "__0_0.distcp").stat().st_size


def test_a_part_may_have_several_files(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.int32).reshape(6, 4)

    def file_of(fqn: str, chunk: Box | None) -> str:
        return f"__{chunk.offsets[1] // 2 if chunk else 7}_0.distcp"

    sink = DcpSink(tmp_path, {"model.a": TensorEntry("model.a", "int32", (6, 4), ())}, {}, {}, file_of)
    writer = sink.open(Part(("__0_0.distcp", "__1_0.distcp", "__7_0.distcp"), ()))
    for box in (Box((0, 0), (6, 2)), Box((0, 2), (4, 2)), Box((4, 2), (2, 2))):
        part = tensor[box.offsets[0] : box.ends[0], box.offsets[1] : box.ends[1]]
        writer.write("model.a", box, box, memoryview(bytearray(bytes_of(part))))
    blob = io.BytesIO()
    torch.save("state", blob)
    writer.write_object("rng", blob.getvalue())
    sink.finish(writer.close())
    source = DcpSource(tmp_path)
    files = [chunk.locator.file for chunk in source.manifest.tensors["model.a"].chunks if chunk.locator]
    assert files == ["__0_0.distcp", "__1_0.distcp", "__1_0.distcp"]
    assert source.manifest.objects["rng"].locator.file == "__7_0.distcp"  # type: ignore[union-attr]
    source.close()
    state = {"model.a": torch.zeros_like(tensor)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model.a"], tensor)


def test_ties_to_nothing_are_refused(tmp_path: Path) -> None:
    sink = DcpSink(tmp_path, {}, {}, {"model.alias": "model.gone"})
    with pytest.raises(MismatchError, match=r"model\.gone"):
        sink.finish([])


def test_an_alias_costs_no_bytes(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    manifest = read_manifest(checkpoint[0])
    alias, canonical = manifest.tensors["model.alias"], manifest.tensors["model.float32"]
    assert alias.chunks == canonical.chunks
    assert manifest.num_bytes == sum(len(bytes_of(t)) for t in checkpoint[1].values())
