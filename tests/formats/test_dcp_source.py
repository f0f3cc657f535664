"""Any box of any tensor, from any cut into chunks."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.core.box import Box
from ckptool.errors import DamagedError, UnsafeError
from ckptool.formats.dcp_source import DcpSource

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """The boxes of a tensor cut along every dim before the given indices."""
    boxes = [Box((), ())]
    for size, at in zip(shape, cuts, strict=True):
        edges = [0, *sorted(set(at)), size]
        spans = [(a, b - a) for a, b in itertools.pairwise(edges)]
        boxes = [Box((*box.offsets, start), (*box.sizes, length)) for box in boxes for start, length in spans]
    return boxes


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))


def write_chunks(folder: Path, tensor: torch.Tensor, boxes: list[Box], transpose: bool) -> None:
    """A checkpoint of one tensor, `a`, in the given chunks; each stored as torch stores a transposed one, if asked."""
    places = {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for i, box in enumerate(boxes):
            part = tensor[slices(box)].clone()
            dims = tuple(reversed(range(part.ndim)))
            start = file.tell()
            torch.save(part.permute(dims).contiguous().permute(dims) if transpose else part, file)
            places[MetadataIndex("a", box.offsets, i)] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"a": entry}, {"a": ("a",)}, places, StorageMeta())))


def read(source: DcpSource, box: Box, dtype: torch.dtype) -> torch.Tensor:
    out = bytearray(b"\xee" * (box.num_elements * dtype.itemsize))
    source.read_into("a", box, memoryview(out))
    return torch.frombuffer(out, dtype=dtype).reshape(box.sizes) if out else torch.empty(box.sizes, dtype=dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """A shape, its chunks, and boxes to read."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [draw(st.lists(st.integers(1, size - 1), max_size=2)) if size > 1 else [] for size in shape]
    boxes = []
    for _ in range(4):
        spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        boxes.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    return shape, grid(shape, cuts), [Box.whole(shape), *boxes]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.booleans(), st.sampled_from([torch.uint8, torch.bfloat16, torch.int64]))
def test_any_box_from_any_chunks(
    tmp_path: Path, case: tuple[tuple[int, ...], list[Box], list[Box]], transpose: bool, dtype: torch.dtype
) -> None:
    shape, chunks, boxes = case
    tensor = torch.arange(Box.whole(shape).num_elements).reshape(shape).to(dtype)
    write_chunks(tmp_path, tensor, chunks, transpose)
    source = DcpSource(tmp_path)
    for box in boxes:
        assert torch.equal(read(source, box, dtype), tensor[slices(box)])
    source.close()


def test_pieces_of_a_column_shard_are_assembled_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.formats.dcp_source._PIECE_BYTES", 100)
    tensor = torch.arange(40 * 9).reshape(40, 9)
    write_chunks(tmp_path, tensor, grid((40, 9), [[17], [4]]), transpose=False)
    source = DcpSource(tmp_path)
    box = Box((3, 2), (30, 6))
    assert torch.equal(read(source, box, torch.int64), tensor[slices(box)])


def test_a_stock_save_of_a_view_with_an_offset(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    dcp.save({"a": base[40:60].reshape(4, 5).t()}, checkpoint_id=tmp_path / "c", no_dist=True)
    source = DcpSource(tmp_path / "c")
    box = Box((1, 1), (3, 2))
    assert torch.equal(read(source, box, torch.float32), base[40:60].reshape(4, 5).t()[slices(box)])


def make_damaged(folder: Path, transpose: bool = False) -> int:
    """A checkpoint with one bit of its payload flipped; returns where."""
    write_chunks(folder, torch.arange(1000).reshape(100, 10), [Box((0, 0), (100, 10))], transpose)
    raw = bytearray((folder / "__0_0.distcp").read_bytes())
    at = raw.index((777).to_bytes(8, "little"))
    raw[at] ^= 1
    (folder / "__0_0.distcp").write_bytes(raw)
    return at


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows_at_once", [100, 30, 1])
def test_a_flipped_bit_is_noticed_when_a_chunk_is_read_through(
    tmp_path: Path, rows_at_once: int, transpose: bool
) -> None:
    make_damaged(tmp_path, transpose)
    source = DcpSource(tmp_path)
    with pytest.raises(DamagedError, match=r"__0_0\.distcp.*checksum") as caught:
        for box in Box.whole((100, 10)).split_rows(rows_at_once):
            read(source, box, torch.int64)
    assert caught.value.exit_code == 4


def test_reading_twice_or_out_of_order_is_no_damage(tmp_path: Path) -> None:
    write_chunks(tmp_path, torch.arange(1000).reshape(100, 10), [Box((0, 0), (100, 10))], False)
    source = DcpSource(tmp_path)
    for start, num_rows in [(0, 10), (50, 10), (0, 60), (60, 40), (0, 100), (0, 100)]:
        box = Box((start, 0), (num_rows, 10))
        assert read(source, box, torch.int64)[0, 0] == start * 10


def test_a_writer_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_chunks(tmp_path, torch.arange(10), [Box((0,), (10,))], False)
    finally:
        torch.serialization.set_crc32_options(True)
    assert read(DcpSource(tmp_path), Box((0,), (10,)), torch.int64).tolist() == list(range(10))


@pytest.mark.parametrize("change", [{"dtype": torch.int64}, {"size": torch.Size([5, 2])}])
def test_a_chunk_that_is_not_what_the_metadata_says(tmp_path: Path, change: dict[str, Any]) -> None:
    write_chunks(tmp_path, torch.ones(2, 5, dtype=torch.float64), [Box((0, 0), (2, 5))], False)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["a"]
    if "dtype" in change:
        entry.properties.dtype = change["dtype"]
    else:
        entry.size = entry.chunks[0].sizes = change["size"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"float64 \[2, 5\], the metadata says"):
        read(DcpSource(tmp_path), Box.whole(tuple(entry.size)), torch.float64)


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/ran",)


def test_objects(tmp_path: Path) -> None:
    groups = ({"lr": 0.1, "betas": (0.9, 0.99), "name": None},)
    dcp.save({"groups": groups, "evil": Evil(tmp_path)}, checkpoint_id=tmp_path / "c", no_dist=True)
    source = DcpSource(tmp_path / "c")
    assert torch.load(io.BytesIO(source.read_object("groups")), weights_only=True) == groups
    assert source.load_object("groups") == groups
    with pytest.raises(UnsafeError, match=r"evil is more than plain data; nothing was run.*system") as caught:
        source.load_object("evil")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    locator = source.manifest.objects["groups"].locator
    assert locator is not None
    with (tmp_path / "c" / locator.file).open("r+b") as file:
        file.seek(locator.offset)
        file.write(bytes(locator.length))
    with pytest.raises(DamagedError, match="groups is damaged"):
        source.load_object("groups")
