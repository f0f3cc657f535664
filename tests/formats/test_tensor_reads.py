"""Reads in pieces by several threads: every bit as torch's own reader brings it, whatever was stored and wanted how."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import ckptool
from ckptool.core.box import Box
from ckptool.distributed import write_sidecars
from ckptool.formats import tensor_reads
from ckptool.formats.dcp_adapters import LoadReader, SaveWriter, box_of
from ckptool.formats.dcp_source import DcpSource, slices
from ckptool.load_check import uneven_reads
from ckptool.ranks import Ranks
from ckptool.storage.digest import TensorDigest
from ckptool.storage.digests_file import read_digests
from ckptool.storage.files import RangeReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Boxes = dict[str, list[Box]]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


class BoxSavePlanner(DefaultSavePlanner):
    """Saves whole tensors as the given boxes, those in `turned` with another order of dims in the file."""

    def __init__(self, boxes: Boxes, turned: frozenset[str]) -> None:
        super().__init__()
        self.boxes, self.turned = boxes, turned

    def create_local_plan(self) -> SavePlan:
        items = []
        for fqn, boxes in self.boxes.items():
            tensor = self.state_dict[fqn]
            for number, box in enumerate(boxes):
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
                items.append(
                    WriteItem(MetadataIndex(fqn, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        stored: dict[str, Any] = {}
        for fqn, boxes in self.boxes.items():
            tensor = self.state_dict[fqn]
            chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]
            stored[fqn] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), chunks)
        return all_plans, Metadata(stored, planner_data={fqn: (fqn,) for fqn in stored})

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        part = self.state_dict[item.index.fqn][slices(self.boxes[item.index.fqn][item.index.index or 0])]
        return part.mT.contiguous().mT if item.index.fqn in self.turned else part.clone()


class BoxLoadPlanner(DefaultLoadPlanner):
    """Loads the given boxes, as one rank of many would, each into a tensor of its own."""

    def __init__(self, targets: dict[str, list[tuple[Box, torch.Tensor]]]) -> None:
        super().__init__()
        self.targets = targets
        self.num_resolved = self.num_committed = 0

    def plan_for(self, metadata: Metadata) -> LoadPlan:
        items: list[ReadItem] = []
        for fqn, parts in self.targets.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in parts]
            stored = metadata.state_dict_metadata[fqn]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(fqn, stored, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.num_resolved += 1
        part = self.targets[read_item.dest_index.fqn][read_item.dest_index.index or 0][1]
        return part[slices(Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.num_committed += 1


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """An exact cover of a tensor, cut along any of its dims."""
    edges = []
    for size in shape:
        inner = draw(st.lists(st.integers(1, size - 1), max_size=2, unique=True)) if size > 1 else []
        edges.append(list(itertools.pairwise([0, *sorted(inner), size])))
    return [Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*edges)]


shapes = st.lists(st.integers(0, 24), max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], Boxes, frozenset[str], list[Boxes]]:
    """Tensors, their chunks, which of them are stored with another order of dims, and what each rank wants."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    tensors, chunks, turned = {}, {}, set()
    ranks: list[Boxes] = [{} for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, 4))):
        shape, dtype, fqn = draw(shapes), draw(st.sampled_from(DTYPES)), f"t{number}"
        tensors[fqn] = torch.randint(0, 7, shape, generator=generator).to(dtype)
        chunks[fqn] = draw(cuts(shape))
        if len(shape) > 1 and draw(st.booleans()):
            turned.add(fqn)
        wanted = draw(cuts(shape))
        is_replicated = draw(st.booleans())
        for rank, boxes in enumerate(ranks):  # each its own part, or all some, or some ranks all of it
            boxes[fqn] = (wanted if draw(st.booleans()) else []) if is_replicated else wanted[rank :: len(ranks)]
    return tensors, chunks, frozenset(turned), ranks


def save(folder: Path, tensors: dict[str, torch.Tensor], chunks: Boxes, turned: frozenset[str]) -> Path:
    write_sidecars(folder, ckptool.Provenance("0"), None, None)
    dcp.save(tensors, storage_writer=SaveWriter(folder, {}), planner=BoxSavePlanner(chunks, turned), no_dist=True)
    return folder


def blank(box: Box, dtype: torch.dtype, is_turned: bool) -> torch.Tensor:
    """A tensor to be filled; `is_turned`, with strides that aren't those of C."""
    if is_turned and len(box.sizes) > 1:
        return torch.ones((*box.sizes[:-2], box.sizes[-1], box.sizes[-2]), dtype=dtype).mT
    return torch.ones(box.sizes, dtype=dtype)


@settings(max_examples=60)
@given(
    case=cases(),
    has_digests=st.booleans(),
    is_turned=st.booleans(),
    is_cast=st.booleans(),
    num_threads=st.integers(1, 8),
    piece_bytes=st.sampled_from([1, 64, 130, 512, 16 << 20]),
)
def test_all_ranks_get_every_bit(
    case: Any, has_digests: bool, is_turned: bool, is_cast: bool, num_threads: int, piece_bytes: int
) -> None:
    tensors, chunks, turned, ranks = case
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_reads, "PIECE_BYTES", piece_bytes)
        patch.setattr(tensor_reads, "num_threads", lambda: num_threads)
        folder = save(Path(name, "c"), tensors, chunks, turned)
        source = DcpSource(folder)
        source.check_crc = not has_digests
        metadata = LoadReader(source).read_metadata()
        planners = []
        for boxes in ranks:
            targets = {}
            for fqn, parts in boxes.items():
                dtype = tensors[fqn].dtype
                dtype = torch.float32 if is_cast and dtype == torch.bfloat16 else dtype
                targets[fqn] = [(box, blank(box, dtype, is_turned)) for box in parts]
            planners.append(BoxLoadPlanner(targets))
        plans = [planner.plan_for(metadata) for planner in planners]
        reads = [(item.storage_index.fqn, box_of(item)) for plan in plans for item in plan.items]
        uneven = uneven_reads(reads, source.manifest, Ranks(), "loading")
        totals: dict[str, TensorDigest] = {}
        counts: dict[str, int] = {}
        for plan, planner in zip(plans, planners, strict=True):
            of_rank = LoadReader(source)
            of_rank.uneven = uneven
            of_rank.read_data(plan, planner)
            assert planner.num_resolved == planner.num_committed == len(plan.items)
            for fqn, (digest, count) in of_rank.digests().items():
                totals[fqn] = totals.get(fqn, TensorDigest()) + digest
                counts[fqn] = counts.get(fqn, 0) + count
        for planner in planners:
            for fqn, parts in planner.targets.items():
                for box, target in parts:
                    assert torch.equal(target, tensors[fqn][slices(box)].to(target.dtype)), fqn
        if has_digests:
            written = read_digests(folder, source.manifest.save_id)
            assert written is not None
            for fqn, total in totals.items():
                copies = counts[fqn] // tensors[fqn].numel()
                assert counts[fqn] % tensors[fqn].numel() == 0
                assert total.lanes == tuple(lane * copies % (1 << 64) for lane in written.tensors[fqn].digest.lanes)
        source.close()


def whole(tensors: dict[str, torch.Tensor]) -> Boxes:
    return {fqn: [Box.whole(tuple(tensor.shape))] for fqn, tensor in tensors.items()}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 kB, by eight threads."""
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 4096)
    monkeypatch.setattr(tensor_reads, "num_threads", lambda: 8)


def read(folder: Path, planner: BoxLoadPlanner) -> None:
    reader = ckptool.StorageReader(folder)
    reader.read_data(planner.plan_for(reader.read_metadata()), planner)


class ScratchPlanner(BoxLoadPlanner):
    """Has memory for one read, and brings what is there to its place when the read is done."""

    scratch = torch.empty(4000)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        lengths = tuple(read_item.lengths)
        return self.scratch[-Box.whole(lengths).num_elements :].view(lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_may_use_the_same_memory_for_every_read(tmp_path: Path, small_pieces: None) -> None:
    tensors = {f"t{i}": torch.rand(100 + i, 30) for i in range(30)}
    folder = save(tmp_path / "c", tensors, whole(tensors), frozenset())
    targets = {fqn: [(Box.whole(tuple(t.shape)), torch.zeros_like(t))] for fqn, t in tensors.items()}
    read(folder, ScratchPlanner(targets))
    assert all(torch.equal(targets[fqn][0][1], tensor) for fqn, tensor in tensors.items())


def test_of_two_names_for_one_tensor_the_last_in_the_file_wins(tmp_path: Path, small_pieces: None) -> None:
    tensors = {"a": torch.zeros(300, 300), "b": torch.ones(300, 300), "c": torch.full((300, 300), 2.0)}
    chunks = {**whole(tensors), "c": [Box((row, 0), (100, 300)) for row in (200, 0, 100)]}
    folder = save(tmp_path / "c", tensors, chunks, frozenset())
    for _ in range(10):
        target = torch.empty(300, 300)
        read(folder, BoxLoadPlanner({fqn: [(Box.whole((300, 300)), target)] for fqn in tensors}))
        assert torch.equal(target, tensors["c"])


def test_columns_of_one_tensor_are_read_side_by_side(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.rand(60, 400)}
    chunks = {"a": [Box((row, column), (20, 40)) for row in (0, 20, 40) for column in range(0, 400, 40)]}
    folder = save(tmp_path / "c", tensors, chunks, frozenset())
    waits: list[int] = []
    wait = tensor_reads.TensorReads.wait

    def counted(self: tensor_reads.TensorReads) -> None:
        waits.append(1)
        wait(self)

    monkeypatch.setattr(tensor_reads.TensorReads, "wait", counted)
    target = torch.zeros(60, 400)
    read(folder, BoxLoadPlanner({"a": [(Box.whole((60, 400)), target)]}))
    assert torch.equal(target, tensors["a"]) and len(waits) == 1


def test_tensors_of_inference_mode_are_filled(tmp_path: Path, small_pieces: None) -> None:
    stored = {"rows": torch.rand(300, 20), "columns": torch.rand(300, 20), "cast": torch.rand(5000)}
    ckptool.save(stored, tmp_path / "c", provenance=ckptool.Provenance("0"))
    with torch.inference_mode():
        state = {"rows": torch.zeros(300, 20), "columns": torch.zeros(20, 300).T, "cast": torch.zeros(5000).double()}
        ckptool.load(state, tmp_path / "c", allow_cast=True)
        assert all(torch.equal(state[fqn], tensor.to(state[fqn].dtype)) for fqn, tensor in stored.items())


def test_files_are_open_a_few_at_a_time_and_none_afterwards(tmp_path: Path, small_pieces: None) -> None:
    stored = {f"t{i}": torch.full((3000,), float(i)) for i in range(200)}
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False)
    dcp.save(stored, storage_writer=writer, no_dist=True)
    num_before, num_open = len(os.listdir("/proc/self/fd")), []
    reader = ckptool.StorageReader(tmp_path / "c")

    class Counting(BoxLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            num_open.append(len(os.listdir("/proc/self/fd")) - num_before)

    targets = {fqn: [(Box.whole((3000,)), torch.zeros(3000))] for fqn in stored}
    planner = Counting(targets)
    reader.read_data(planner.plan_for(reader.read_metadata()), planner)
    assert all(torch.equal(targets[fqn][0][1], tensor) for fqn, tensor in stored.items())
    assert 1 <= max(num_open) <= (1 + 8) * 8  # of the threads and the one that plans
    del reader
    assert len(os.listdir("/proc/self/fd")) == num_before


def test_a_large_chunk_with_another_order_of_dims_is_read_once(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": torch.rand(100, 200) for i in range(4)}
    folder = save(tmp_path / "c", tensors, whole(tensors), frozenset(tensors))
    read_bytes: list[int] = []
    read_into = RangeReader.read_into

    def counted(self: RangeReader, name: str, offset_bytes: int, out: memoryview) -> None:
        read_bytes.append(len(out))
        read_into(self, name, offset_bytes, out)

    monkeypatch.setattr(RangeReader, "read_into", counted)
    targets = {fqn: [(Box.whole((100, 200)), torch.zeros(100, 200))] for fqn in tensors}
    read(folder, BoxLoadPlanner(targets))
    assert all(torch.equal(targets[fqn][0][1], tensor) for fqn, tensor in tensors.items())
    assert sum(size for size in read_bytes if size > 4096) == 4 * 100 * 200 * 4


class FailingPlanner(BoxLoadPlanner):
    """Raises an error at one of its calls."""

    def __init__(self, targets: Any, error: BaseException, call: str) -> None:
        super().__init__(targets)
        self.error, self.call = error, call

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self.call == "resolve" and self.num_resolved == 20:
            raise self.error
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        if self.call == "commit" and self.num_committed == 10:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt("no more")])
@pytest.mark.parametrize("call", ["resolve", "commit"])
def test_an_error_of_the_planner_ends_the_threads(
    tmp_path: Path, small_pieces: None, error: BaseException, call: str
) -> None:
    tensors = {f"t{i}": torch.rand(2000) for i in range(40)}
    folder = save(tmp_path / "c", tensors, whole(tensors), frozenset())
    targets = {fqn: [(Box.whole((2000,)), torch.zeros(2000))] for fqn in tensors}
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="no more"):
        read(folder, FailingPlanner(targets, error, call))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensors")]


def test_loads_in_threads_of_one_process_do_not_mix(tmp_path: Path, small_pieces: None) -> None:
    for i in range(4):
        stored = {f"t{j}": torch.full((3000,), float(10 * i + j)) for j in range(10)}
        ckptool.save(stored, tmp_path / f"c{i}", provenance=ckptool.Provenance("0"))

    def load(i: int) -> dict[str, torch.Tensor]:
        state = {f"t{j}": torch.zeros(3000) for j in range(10)}
        ckptool.load(state, tmp_path / f"c{i}")
        return state

    with ThreadPoolExecutor(4) as threads:
        for i, state in enumerate(threads.map(load, range(4))):
            assert all(bool((state[f"t{j}"] == 10 * i + j).all()) for j in range(10))


def _load_in_child(folder: Path) -> None:
    state = {"t": torch.zeros(3000)}
    ckptool.load(state, folder)
    os._exit(0 if bool((state["t"] == 3).all()) else 1)


def test_a_process_that_is_forked_after_a_load_can_load(tmp_path: Path, small_pieces: None) -> None:
    ckptool.save({"t": torch.full((3000,), 3.0)}, tmp_path / "c", provenance=ckptool.Provenance("0"))
    ckptool.load({"t": torch.zeros(3000)}, tmp_path / "c")
    child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(tmp_path / "c",))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_archives_without_checksums_are_read(tmp_path: Path, small_pieces: None) -> None:
    stored = {"rows": torch.rand(300, 20), "turned": torch.rand(20, 300).T}
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(stored, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    state = {fqn: torch.zeros(300, 20) for fqn in stored}
    ckptool.load(state, tmp_path / "c")
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in stored.items())


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_pieces_of_a_chunk_without_digest_have_its_checksum(tmp_path: Path, small_pieces: None, place: float) -> None:
    stored = {"a": torch.rand(300, 200), "b": torch.rand(3000)}
    dcp.save(stored, checkpoint_id=tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.distcp")
    content, payload = bytearray(file.read_bytes()), stored["a"].numpy().tobytes()
    content[content.index(payload) + int(place * (len(payload) - 1))] ^= 1
    file.write_bytes(content)
    with pytest.raises(ckptool.CkptoolError, match="have changed since they were written"):
        ckptool.load({name: torch.zeros_like(tensor) for name, tensor in stored.items()}, tmp_path / "c")


@pytest.mark.parametrize("ranks", ["", "0", "-1", "7", "two", "²", "1000000"])
def test_the_number_of_threads_is_the_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert 2 <= tensor_reads.num_threads() <= 8
