"""The streamed .pt file against the one that torch's own converter writes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils import _pytree

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, StorageError, UnsupportedError
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.torch_file import TorchFileSink


def make_state() -> dict[str, Any]:
    return {
        "model": {
            "a": torch.arange(24.0).reshape(6, 4),
            "half": torch.arange(7, dtype=torch.bfloat16),
            "unsigned": torch.arange(4).to(torch.uint16),
            "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
        },
        "optim": {"state": [{"exp_avg": torch.ones(3)}], "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "inside": (torch.arange(3), "text"),
        "step": 5,
        "data": {"record": "{}"},
    }


def stream(source: DcpSource, target: Path, max_rows: int = 2) -> None:
    sink = TorchFileSink(target, source.manifest)
    for fqn in source.manifest.objects:
        sink.write_object(fqn, source.read_object(fqn))
    for fqn, entry in source.manifest.tensors.items():
        for box in Box.whole(entry.shape).split_rows(max_rows):
            data = memoryview(bytearray(box.num_elements * entry.itemsize_bytes))
            source.read_into(fqn, box, data)
            sink.write(fqn, box, box, data)
    sink.close()


def assert_same(a: Any, b: Any) -> None:
    flat_a, spec_a = _pytree.tree_flatten_with_path(a)
    flat_b, spec_b = _pytree.tree_flatten_with_path(b)
    assert spec_a == spec_b
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()), path
            assert x.reshape(-1).view(torch.uint8).tolist() == y.reshape(-1).view(torch.uint8).tolist(), path
        else:
            assert x == y, path


def test_no_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built for CUDA, torch 2.11 died of a segmentation fault in there, with a driver and no GPU to be seen."""
    dcp.save(make_state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    asked: list[bool] = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: asked.append(True))
    source = DcpSource(tmp_path / "ckpt")
    stream(source, tmp_path / "all.pt")
    source.close()
    assert not asked


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_equal_to_the_reference_road(tmp_path: Path) -> None:
    dcp.save(make_state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "reference").mkdir()
    dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "reference" / "all.pt")
    source = DcpSource(tmp_path / "ckpt")
    stream(source, tmp_path / "all.pt")
    source.close()
    reference = torch.load(tmp_path / "reference" / "all.pt", weights_only=True)
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True), reference)
    assert_same(torch.load(tmp_path / "all.pt", weights_only=True, mmap=True), reference)
    with (
        zipfile.ZipFile(tmp_path / "all.pt") as ours,
        zipfile.ZipFile(tmp_path / "reference" / "all.pt") as theirs,
    ):
        assert ours.testzip() is None
        assert ours.namelist() == theirs.namelist()
        differing = [name for name in ours.namelist() if ours.read(name) != theirs.read(name)]
        assert differing == ["all/data.pkl", "all/.data/serialization_id"]


def one_tensor_sink(path: Path) -> TorchFileSink:
    return TorchFileSink(path, Manifest("somewhere", {"a": TensorEntry("a", "uint8", (4, 2), ())}))


def test_a_tensor_not_written_whole_is_refused(tmp_path: Path) -> None:
    sink = one_tensor_sink(tmp_path / "a.pt")
    sink.write("a", Box.whole((4, 2)), Box((0, 0), (3, 2)), memoryview(bytearray(6)))
    with pytest.raises(MismatchError, match="6 of 8 bytes of a"):
        sink.close()


def test_pieces_out_of_order_are_refused(tmp_path: Path) -> None:
    sink = one_tensor_sink(tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match="order"):
        sink.write("a", Box.whole((4, 2)), Box((2, 0), (2, 2)), memoryview(bytearray(4)))


def test_objects_must_come_before_tensors(tmp_path: Path) -> None:
    sink = one_tensor_sink(tmp_path / "a.pt")
    sink.write("a", Box.whole((4, 2)), Box((0, 0), (4, 2)), memoryview(bytearray(8)))
    blob = io.BytesIO()
    torch.save(1, blob)
    with pytest.raises(MismatchError, match="after tensors"):
        sink.write_object("step", blob.getvalue())


@pytest.mark.slow
def test_a_storage_beyond_four_gigabytes(tmp_path: Path) -> None:
    rows, row_bytes = 66, 64 << 20
    manifest = Manifest("somewhere", {"a": TensorEntry("a", "uint8", (rows, row_bytes), ())})
    sink = TorchFileSink(tmp_path / "big.pt", manifest)
    for row in range(rows):
        sink.write(
            "a", Box.whole((rows, row_bytes)), Box((row, 0), (1, row_bytes)), memoryview(bytes([row]) * row_bytes)
        )
    sink.close()
    with zipfile.ZipFile(tmp_path / "big.pt") as archive:
        assert archive.testzip() is None
    loaded = torch.load(tmp_path / "big.pt", weights_only=True, mmap=True)["a"]
    assert [int(row[-1]) for row in loaded] == list(range(rows))


def test_a_disk_that_refuses_is_our_error(tmp_path: Path) -> None:
    dcp.save(make_state(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    with pytest.raises(StorageError, match="can't be written"):
        stream(DcpSource(tmp_path / "ckpt"), Path("/dev/full"))
