"""Collective save and load on real gloo ranks: exact values on any world size, and one outcome for all ranks."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptool
from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.core.tensors import TensorEntry
from ckptool.errors import CkptoolError, DistributedError, MismatchError, TargetExistsError, UnsafeError
from ckptool.load_check import uneven_reads
from ckptool.ranks import Ranks
from tests.spawn import run_ranks

UNEVEN_ROWS = (6, 5, 1)


class Explodes:
    """Pickling this fails, with an error that can't be pickled itself."""

    def __reduce__(self) -> Any:
        error = ValueError("disk on fire")
        error.socket = lambda: None  # type: ignore[attr-defined]
        raise error


class Dies:
    """Pickling this ends the process, as a lost machine would."""

    def __reduce__(self) -> Any:
        os._exit(0)


def whole_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"rows{n}": torch.arange(n * 3, dtype=torch.float32).reshape(n, 3) for n in UNEVEN_ROWS}
    return tensors | {"columns": torch.arange(14.0, dtype=torch.bfloat16).reshape(2, 7), "bias": torch.ones(4)}


def sharded(tensors: dict[str, torch.Tensor], world_size: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    placements = {"columns": Shard(1), "bias": Replicate()}
    return {name: distribute_tensor(t, mesh, [placements.get(name, Shard(0))]) for name, t in tensors.items()}


def blank(world_size: int) -> dict[str, Any]:
    zeros = {name: torch.zeros_like(t) for name, t in whole_tensors().items()}
    return {"model": sharded(zeros, world_size), "step": 0, "data": {"record": "", "cursor": torch.zeros(8).long()}}


def error_of(function: Any) -> tuple[str, str]:
    """Class and message of the error that `function` raises."""
    try:
        function()
    except CkptoolError as error:
        return type(error).__name__, str(error)
    return "", ""


def save_on_ranks(rank: int, root: Path, world_size: int) -> dict[str, Any]:
    provenance = ckptool.Provenance("0", step=7, world_size=world_size, ties={"head": "rows6"})
    data = {"record": "{}", "cursor": torch.arange(8)}
    state = {"model": sharded(whole_tensors(), world_size), "step": 7, "data": data}
    (root / "side").mkdir(exist_ok=True)
    (root / "side" / "config.json").write_text("{}")
    target = root / "step-7"
    ckptool.save(
        state,
        target,
        provenance=provenance,
        ties={"model.head": "model.rows6"},
        side_folder=root / "side",
        position=DataPosition.begin([DataSource("a", 10)], seq_len=4, seed=0, global_batch_size=2).advance(7),
    )
    outcome: dict[str, Any] = {"again": error_of(lambda: ckptool.save(state, target, provenance=provenance))}
    outcome["per rank"] = error_of(
        lambda: ckptool.save({"rng": torch.full((2,), rank)}, root / "step-8", provenance=provenance)
    )
    ahead = DataPosition.begin([DataSource("a", 10)], seq_len=4, seed=0, global_batch_size=2).advance(7 + (rank == 3))
    outcome["positions"] = error_of(
        lambda: ckptool.save({"data": {"record": ahead.to_json()}}, root / "step-8", provenance=provenance)
    )
    start = time.monotonic()
    bad = {**state, "extra": Explodes()} if rank == 2 else state
    outcome["failing"] = error_of(lambda: ckptool.save(bad, root / "step-9", provenance=provenance))
    outcome["untied"] = error_of(
        lambda: ckptool.save(state, root / "step-9", provenance=provenance, ties={"model.head": "model.gone"})
    )
    outcome["failing seconds"] = time.monotonic() - start
    return outcome


def load_on_ranks(rank: int, root: Path, world_size: int) -> dict[str, Any]:
    state = blank(world_size)
    ckptool.load(state, root / "step-7")
    outcome: dict[str, Any] = {
        "tensors": {name: t.full_tensor().float().tolist() for name, t in state["model"].items()},
        "plain": (state["step"], state["data"]["record"], state["data"]["cursor"].tolist()),
    }
    renamed = blank(world_size)
    renamed["model"]["head"] = renamed["model"].pop("rows6")
    ckptool.load({"model": renamed["model"]}, root / "step-7")
    outcome["alias"] = renamed["model"]["head"].full_tensor().tolist()

    narrow = blank(world_size)
    narrow["model"]["rows5"] = sharded({"rows5": torch.zeros(5, 3, dtype=torch.bfloat16)}, world_size)["rows5"]
    outcome["narrow"] = error_of(lambda: ckptool.load(narrow, root / "step-7"))
    ckptool.load(narrow, root / "step-7", allow_cast=True)
    outcome["cast"] = narrow["model"]["rows5"].full_tensor().tolist()

    fewer = blank(world_size)
    fewer["model"]["new"] = torch.zeros(1)
    del fewer["model"]["bias"]
    outcome["names"] = error_of(lambda: ckptool.load(fewer, root / "step-7"))
    ckptool.load(fewer, root / "step-7", allow_missing={"model.new"}, ignore=["model.bias"])
    outcome["allowed"] = fewer["model"]["rows6"].full_tensor().tolist()

    elsewhere = root / "step-7" if rank != 1 else root / "nowhere"
    outcome["one blind rank"] = error_of(lambda: ckptool.load(blank(world_size), elsewhere))
    outcome["unsafe"] = error_of(lambda: ckptool.load(blank(world_size), root / "unsafe"))
    return outcome


def save_while_one_dies(rank: int, root: Path) -> tuple[str, str]:
    state: dict[str, Any] = {"a": torch.ones(2), "extra": Dies()} if rank == 1 else {"a": torch.ones(2)}
    return error_of(lambda: ckptool.save(state, root / "step-10", provenance=ckptool.Provenance("0")))


class RunsCommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def saved(root: Path) -> list[dict[str, Any]]:
    """Four ranks have saved `step-7`, and tried in vain to save others."""
    outcomes = run_ranks(4, save_on_ranks, root, 4)
    (root / "unsafe").mkdir()
    (root / "unsafe" / ".metadata").write_bytes(pickle.dumps(RunsCommand(f"touch {root}/ran")))
    return outcomes


def test_a_taken_target_is_refused_on_all_ranks(saved: list[dict[str, Any]]) -> None:
    assert {outcome["again"][0] for outcome in saved} == {TargetExistsError.__name__}


def test_values_that_differ_by_rank_are_refused(saved: list[dict[str, Any]]) -> None:
    """Field report 2, pytorch#120356: one key with a value per rank kept one rank's."""
    assert {outcome["per rank"][0] for outcome in saved} == {MismatchError.__name__}
    assert "rng" in saved[3]["per rank"][1]


def test_ranks_that_stand_at_different_places_of_the_data_save_nothing(saved: list[dict[str, Any]], root: Path) -> None:
    assert {outcome["positions"][0] for outcome in saved} == {MismatchError.__name__}
    assert "data.record" in saved[0]["positions"][1]
    assert not (root / "step-8").exists()


def test_one_rank_failing_is_every_ranks_error_and_nothing_is_published(
    saved: list[dict[str, Any]], root: Path
) -> None:
    """Field report 24, xtuner#1852, transformers#48569: the other ranks ended in a time-out, without the cause."""
    kinds, messages = zip(*(outcome["failing"] for outcome in saved), strict=True)
    assert set(kinds) == {DistributedError.__name__}
    assert all("rank 2" in message and "ValueError: disk on fire" in message for message in messages)
    assert {outcome["untied"][0] for outcome in saved} == {DistributedError.__name__}
    assert "model.gone" in saved[1]["untied"][1]
    assert max(outcome["failing seconds"] for outcome in saved) < 20
    assert sorted(path.name for path in root.iterdir() if path.name.startswith((".", "step-"))) == ["step-7"]


def test_what_was_saved(saved: list[dict[str, Any]], root: Path) -> None:
    manifest = ckptool.open_checkpoint(root / "step-7")
    assert manifest.ties == {"model.head": "model.rows6"}
    assert manifest.provenance is not None and manifest.provenance.step == 7
    assert [chunk.box.sizes[0] for chunk in manifest.tensors["model.rows5"].chunks] == [2, 2, 1, 0]
    assert (root / "step-7" / "hf" / "config.json").read_text() == "{}"
    assert str(root).encode() not in (root / "step-7" / ".metadata").read_bytes()
    summary = next(s for s in ckptool.list_checkpoints(root) if s.name == "step-7")
    assert (summary.complete, summary.consumed, summary.world_size) == (True, 14, 4)


@pytest.mark.parametrize("world_size", [3, 1])
def test_load_on_another_world_size(saved: list[dict[str, Any]], root: Path, world_size: int) -> None:
    outcomes = run_ranks(world_size, load_on_ranks, root, world_size)
    expected = {name: t.float().tolist() for name, t in whole_tensors().items()}
    for outcome in outcomes:
        assert outcome["tensors"] == expected
        assert outcome["plain"] == (7, "{}", list(range(8)))
        assert outcome["alias"] == expected["rows6"]
        assert outcome["cast"] == expected["rows5"]
        assert outcome["allowed"] == expected["rows6"]
        kind, message = outcome["narrow"]
        assert kind == MismatchError.__name__
        assert "model.rows5 is float32 in the checkpoint, bfloat16 here" in message
        kind, message = outcome["names"]
        assert kind == MismatchError.__name__
        assert "not in the checkpoint: model.new" in message and "not asked for: model.bias" in message
        assert outcome["unsafe"][0] == UnsafeError.__name__
        assert "system" in outcome["unsafe"][1]
    assert not (root / "ran").exists()
    if world_size > 1:
        assert {outcome["one blind rank"][0] for outcome in outcomes} == {"NotFoundError"}
        assert all("rank 1" in outcome["one blind rank"][1] for outcome in outcomes)


def test_a_lost_rank_ends_the_save_of_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    outcomes = run_ranks(3, save_while_one_dies, tmp_path)
    assert outcomes[1] is None
    assert {outcomes[0][0], outcomes[2][0]} == {DistributedError.__name__}
    assert time.monotonic() - start < 60
    assert not (tmp_path / "step-10").exists()


@pytest.mark.filterwarnings("error")
def test_one_process_without_a_group_saves_and_loads_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    state = {"model": {"a": transposed}, "optim": {"state": {"a": {"step": torch.tensor(3.0)}}}, "name": "run"}
    ckptool.save(state, tmp_path / "step-1", provenance=ckptool.Provenance("0", step=1))
    template = {"model": {"a": torch.zeros(3, 2)}}
    ckptool.load(template, tmp_path / "step-1")
    assert torch.equal(template["model"]["a"], transposed)
    everything = {"model": {"a": torch.zeros(3, 2)}, "optim": {"state": {"a": {"step": torch.tensor(0.0)}}}, "name": ""}
    ckptool.load(everything, tmp_path / "step-1")
    assert (everything["name"], everything["optim"]["state"]["a"]["step"]) == ("run", 3.0)
    assert capfd.readouterr() == ("", "")


def test_a_failed_save_leaves_the_previous_checkpoint_alone(tmp_path: Path) -> None:
    ckptool.save({"a": torch.ones(2)}, tmp_path / "step-1", provenance=ckptool.Provenance("0"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()}
    with pytest.raises(TargetExistsError):
        ckptool.save({"a": torch.zeros(2)}, tmp_path / "step-1", provenance=ckptool.Provenance("0"))
    with pytest.raises(DistributedError, match="disk on fire"):
        ckptool.save({"a": torch.zeros(2), "b": Explodes()}, tmp_path / "step-2", provenance=ckptool.Provenance("0"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_flat_state_dicts_are_compared_whole(tmp_path: Path) -> None:
    ckptool.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "c", provenance=ckptool.Provenance("0"))
    with pytest.raises(MismatchError, match="not asked for: b"):
        ckptool.load({"a": torch.zeros(2)}, tmp_path / "c")
    with pytest.raises(MismatchError, match="a is a tensor in the checkpoint, a plain value here"):
        ckptool.load({"a": 1, "b": torch.zeros(2)}, tmp_path / "c")


def test_a_stack_trace_can_be_sent_to_another_rank() -> None:
    try:
        raise ValueError("here")
    except ValueError as error:
        stack = traceback.extract_tb(error.__traceback__)
    if hasattr(stack[0], "_code"):  # Python 3.13: what makes frames unpicklable without our reducer
        object.__setattr__(stack[0], "_code", error_of.__code__)
    assert pickle.loads(pickle.dumps(stack))[0].name == stack[0].name


def test_side_files_that_are_gone_stop_the_save_before_it_is_published(tmp_path: Path) -> None:
    with pytest.raises(ckptool.NotFoundError, match="hf is gone"):
        provenance = ckptool.Provenance("test")
        ckptool.save({"a": torch.ones(2)}, tmp_path / "new", provenance=provenance, side_folder=tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def load_flipped(rank: int, folder: str) -> str:
    """Every rank reads a part of each stored chunk, so that no chunk's own checksum is ever complete."""
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.zeros(64, 32), mesh, [Shard(0)])}
    return ": ".join(error_of(lambda: ckptool.load(state, Path(folder))))


def flipped(folder: Path, place: int) -> str:
    """A checkpoint of 64 x 32 numbers, of which one has changed; its data file."""
    weights = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32)
    ckptool.save({"w": weights}, folder, provenance=ckptool.Provenance("test"))
    (file,) = folder.glob("*.distcp")
    raw = bytearray(file.read_bytes())
    raw[raw.index(weights.numpy().tobytes()) + place] ^= 1
    file.write_bytes(raw)
    return file.name


def test_a_flipped_bit_is_found_by_ranks_that_each_read_a_part(tmp_path: Path) -> None:
    name = flipped(tmp_path / "a", 5001)
    for outcome in run_ranks(3, load_flipped, str(tmp_path / "a")):
        assert outcome.startswith("DamagedError: w has changed since it was written") and name in outcome


def load_on_two_of_three(rank: int, folder: str) -> str:
    """The tensor is split over three ranks, of which two load: what they read can't be held against its digest."""
    mesh = init_device_mesh("cpu", (3,))
    group = torch.distributed.new_group([0, 1])
    if rank == 2:
        return "not asked"
    state = {"w": distribute_tensor(torch.zeros(64, 32), mesh, [Shard(0)], src_data_rank=None)}
    outcome = ": ".join(filter(None, error_of(lambda: ckptool.load(state, Path(folder), process_group=group))))
    expected = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32)[22 * rank : 22 * rank + 22]
    return outcome or ("equal" if torch.equal(state["w"].to_local(), expected) else "different")


def test_a_part_of_a_tensor_is_checked_by_the_checksums_of_its_chunks(tmp_path: Path) -> None:
    weights = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32)
    ckptool.save({"w": weights}, tmp_path / "good", provenance=ckptool.Provenance("test"))
    assert run_ranks(3, load_on_two_of_three, str(tmp_path / "good")) == ["equal", "equal", "not asked"]
    name = flipped(tmp_path / "bad", 5001)
    for outcome in run_ranks(3, load_on_two_of_three, str(tmp_path / "bad"))[:2]:
        assert outcome.startswith("DamagedError") and name in outcome and "checksum mismatch" in outcome


def rows(*reads: tuple[int, int]) -> list[tuple[str, Box]]:
    """Reads of rows (first, number) of a tensor of 8 x 2."""
    return [("w", Box((first, 0), (number, 2))) for first, number in reads]


@pytest.mark.parametrize(
    ("of_ranks", "is_even"),
    [
        ([rows((0, 4), (4, 4))], True),
        ([rows((0, 3)), rows((3, 1), (4, 4))], True),
        ([rows((0, 4)), rows((0, 4)), rows((4, 4)), rows((4, 4))], True),
        ([rows((0, 4))], False),
        ([rows((0, 4)), rows((0, 4))], False),  # as many elements as the tensor has
        ([rows((0, 4), (4, 4)), rows((4, 4))], False),
        ([rows((0, 4), (4, 4)), rows((0, 2), (2, 2), (4, 4))], True),
        ([rows((0, 4), (4, 4)), rows((0, 2), (1, 3), (4, 4))], False),
        ([rows((0, 4), (4, 4)), rows((0, 3), (2, 2), (4, 3))], False),  # as many again
        ([[], []], True),
    ],
)
def test_reads_that_do_not_add_up_are_known_before(of_ranks: list[list[tuple[str, Box]]], is_even: bool) -> None:
    """What the ranks add up is what one has that reads it all."""
    manifest = Manifest("x", {"w": TensorEntry("w", "float32", (8, 2), ())})
    reads = [read for of_rank in of_ranks for read in of_rank]
    assert uneven_reads(reads, manifest, Ranks(), "loading") == (frozenset() if is_even else {"w"})
