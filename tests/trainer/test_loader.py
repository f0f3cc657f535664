"""A loader of one's own: its state goes into the checkpoint, for as many ranks as it was saved on."""

import sys
import textwrap

import pytest
import torch

from ckptool import DamagedError, MismatchError, UnsupportedError, UsageError
from tests.trainer.tiny import read_lines, run
from trainer.data import open_data, prepare
from trainer.loader import LoaderData
from trainer.sources.spec import SourceSpec, parse_sources
from trainer.units import IGNORED

MODULE = '''
import torch

class Loader:
    """Rows of counting numbers; rank r has every world_size-th item of 20."""

    def __init__(self, rank, world_size, size=2):
        self.items = range(rank, 20, world_size)
        self.next, self.size = 0, size

    def __iter__(self):
        while self.next < len(self.items):
            self.next += 1
            first = self.items[self.next - 1]
            yield {"input_ids": torch.arange(first, first + 9).repeat(self.size, 1)}
        self.next = 0

    def state_dict(self):
        return {"next": self.next, "noise": torch.arange(3), "kind": b"x"}

    def load_state_dict(self, state):
        self.next = state["next"]

def make(rank, world_size):
    return Loader(rank, world_size)

def broken(rank, world_size):
    raise OSError("no disk")

def plain(rank, world_size):
    return [1]

def wide(rank, world_size):
    return Loader(rank, world_size, 3)

class Unsaved(Loader):
    def state_dict(self):
        return {"loader": self}

class Empty(Loader):
    def __iter__(self):
        return iter(())

class Odd(Loader):
    def __iter__(self):
        for item in super().__iter__():
            yield {**item, "labels": item["input_ids"] + 1}

class Lists(Loader):
    def __iter__(self):
        yield {"input_ids": [[1, 2]]}
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_loader.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_loader", raising=False)


def open_loader(function="make", rank=0, world_size=1):
    return LoaderData(SourceSpec("loader", (f"own_loader:{function}",), "own"), rank, world_size, seq_len=8)


def firsts(data, position, rank=0, world_size=1):
    batches = data.micro_batches(position, rank, world_size, 2)
    return [(batch.units, int(batch.inputs[0, 0])) for batch in batches]


class OneRank:
    def gather_data(self, value):
        return [value]


def test_items_become_units_and_labels_are_shifted():
    data = open_loader()
    position = data.start(seed=0, global_batch_size=4)
    [first, second] = data.micro_batches(position, 0, 1, 2)
    assert (first.units, second.units) == ((0, 1), (2, 3))
    assert first.inputs.tolist() == [list(range(8))] * 2
    assert first.labels.tolist() == [list(range(1, 9))] * 2


def test_ranks_share_the_numbers_of_a_step():
    position = open_loader().start(seed=0, global_batch_size=8).advance()
    units = [firsts(open_loader(rank=rank, world_size=2), position, rank, 2) for rank in range(2)]
    assert units == [[((8, 9), 0), ((10, 11), 2)], [((12, 13), 1), ((14, 15), 3)]]


def test_a_state_goes_on_also_over_the_loaders_end():
    smooth, rough = open_loader(), open_loader()
    position = smooth.start(seed=0, global_batch_size=6)
    for _ in range(15):
        expected = firsts(smooth, position)
        state = rough.lane_states(OneRank())
        rough = open_loader()
        rough.restore_lanes(state)
        assert firsts(rough, position) == expected
        position = position.advance()


def test_another_world_size_is_refused_with_what_would_happen():
    states = {"own": {f"{rank:05}": "" for rank in range(4)}}
    with pytest.raises(
        MismatchError, match=r"saved on 4 ranks and there are 2.*trained again and others are skipped"
    ) as caught:
        open_loader(world_size=2).restore_lanes(states)
    assert "start 4 ranks" in caught.value.hint


def test_a_state_that_is_none_is_damaged():
    with pytest.raises(DamagedError, match="not the state of a loader"):
        open_loader().restore_lanes({"own": {"00000": "AAAA"}})


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("absent", UsageError, "no loader own_loader:absent"),
        ("broken", UsageError, r"own_loader:broken\(0, 1\) failed: OSError: no disk"),
        ("plain", UnsupportedError, "has no state_dict, so it can't be resumed"),
    ],
)
def test_a_function_that_makes_no_loader_is_named(function, error, message):
    with pytest.raises(error, match=message):
        open_loader(function)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("wide", UsageError, "an item has 3 rows, not 2"),
        ("Empty", UsageError, "gives nothing on rank 0"),
        ("Odd", UnsupportedError, "labels should be the input_ids"),
        ("Lists", UnsupportedError, "int64 input_ids of two dims"),
    ],
)
def test_items_that_can_not_be_trained_are_refused(function, error, message):
    data = open_loader(function)
    with pytest.raises(error, match=message):
        firsts(data, data.start(seed=0, global_batch_size=2))


def test_a_state_that_could_not_be_read_again_is_refused_when_it_is_saved():
    with pytest.raises(UnsupportedError, match="more than plain data"):
        open_loader("Unsaved").lane_states(OneRank())


def test_a_batch_that_ranks_can_not_share_evenly_is_refused():
    data = open_loader(world_size=2)
    with pytest.raises(UsageError, match="can't share 6 units"):
        firsts(data, data.start(seed=0, global_batch_size=6), world_size=2)


def test_labels_that_are_ignored_stay_so():
    item = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[IGNORED, IGNORED, 3]])}
    batch = open_loader()._parse(item)
    assert (batch.inputs.tolist(), batch.labels.tolist()) == ([[1, 2]], [[IGNORED, 3]])


def test_torchdatas_stateful_loader_goes_on():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [{"input_ids": torch.arange(n, n + 9)} for n in range(14)]
    smooth, rough = open_loader(), open_loader()
    for data in (smooth, rough):
        data._loader = stateful.StatefulDataLoader(rows, batch_size=2, shuffle=True)
    position = smooth.start(seed=0, global_batch_size=4)
    rough.restore_lanes(smooth.lane_states(OneRank()))
    for _ in range(9):
        expected = firsts(smooth, position)
        assert firsts(rough, position) == expected
        state, rough = rough.lane_states(OneRank()), open_loader()
        rough._loader = stateful.StatefulDataLoader(rows, batch_size=2, shuffle=True)
        rough.restore_lanes(state)
        position = position.advance()


def test_a_loader_is_alone(tmp_path):
    [spec] = parse_sources(["loader:own_loader:make"])
    assert (spec.paths, spec.name) == (("own_loader:make",), "own_loader:make")
    (tmp_path / "more.toml").write_text('[[source]]\nkind = "loader"\npath = "own_loader:make"\n' * 2)
    with pytest.raises(UsageError, match="two sources"):
        parse_sources([str(tmp_path / "more.toml")])
    prepared = prepare(("loader:own_loader:make",), "window", 8, tmp_path, tmp_path, print)
    with pytest.raises(UsageError, match="can't be mixed"):
        open_data(prepared * 2, "window", 8, tmp_path, 0, 1)


def test_a_run_over_a_loader_resumes_where_it_stood(root, tmp_path):
    changes = {"data": ("loader:own_loader:make",), "global_batch_size": 4, "schedule": "constant"}
    smooth = run(root, steps=4, **changes)
    for name in ("step-4", "metrics.jsonl"):
        (root / name).rename(tmp_path / name)
    run(root, steps=3, **changes)
    run(root, steps=4, **changes)
    assert [line["loss"] for line in read_lines(root / "metrics.jsonl")] == [line["loss"] for line in smooth]
