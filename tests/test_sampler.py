"""GlobalBatchSampler: kills, world sizes, workers and batch sizes neither repeat nor skip a sample; mutants do."""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from ckptool import DataSource, GlobalBatchSampler
from ckptool.core.position import DataPosition, Stretch, rank_units
from ckptool.errors import DamagedError, MismatchError, UsageError

NUM_SAMPLES = 30


class Attempt(NamedTuple):
    """A process's life: it trains `num_steps`, saves after `saved_at` of them (0: never), and is killed."""

    world_size: int
    micro_batch_size: int
    batch_size: int
    num_steps: int
    saved_at: int
    num_prefetched: int


attempts = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(5, 9), st.integers(1, 6), st.integers(0, 6), st.integers(0, 7)
).map(lambda numbers: Attempt(*numbers))


def surviving_steps(sampler_class, plan):
    """The samples of each step whose training a checkpoint kept, over attempts that go on from the last save."""
    state, survived = None, []
    for attempt in plan:
        ranks = [
            sampler_class(
                NUM_SAMPLES,
                global_batch_size=attempt.batch_size,
                micro_batch_size=attempt.micro_batch_size,
                rank=rank,
                world_size=attempt.world_size,
            )
            for rank in range(attempt.world_size)
        ]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        fetchers = [(sampler, iter(sampler), deque()) for sampler in ranks]
        steps = []
        for number in range(1, attempt.num_steps + 1):
            steps.append([])
            for micro_batch in range(ranks[0].num_micro_batches):
                for sampler, fetch, fetched in fetchers:
                    while len(fetched) <= attempt.num_prefetched:
                        fetched.append(next(fetch))
                    samples = fetched.popleft()
                    assert samples, "no loader can collate an empty list"
                    steps[-1] += samples[: sampler.num_real(micro_batch)]
            for sampler in ranks:
                sampler.step()
            if number == attempt.saved_at:
                states = [sampler.state_dict() for sampler in ranks]
                assert len({one["record"] for one in states}) == 1, "the ranks' states differ"
                state, kept = states[0], len(steps)
                survived += steps[:kept]
    return survived


def is_the_one_stream(steps) -> bool:
    order = DataPosition.begin([DataSource("data", NUM_SAMPLES)], seq_len=1, seed=0, global_batch_size=1)
    numbers = iter(order.units(range(sum(map(len, steps)))))
    return all(sorted(step) == sorted(next(numbers).index for _ in step) for step in steps)


@given(st.lists(attempts, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_whatever_is_killed_and_changed_each_sample_is_trained_once_in_order(plan):
    steps = surviving_steps(GlobalBatchSampler, plan)
    assert is_the_one_stream(steps)
    sizes = [a.batch_size for a in plan if 0 < a.saved_at <= a.num_steps for _ in range(a.saved_at)]
    assert list(map(len, steps)) == sizes


class AdvancesAtFetch(GlobalBatchSampler):
    def samples_of(self, position, micro_batch):
        if micro_batch == self.num_micro_batches - 1:
            self.position = position.advance()
        return super().samples_of(position, micro_batch)

    def step(self):
        pass


class AdvancesPerMicroBatch(GlobalBatchSampler):
    def step(self):
        self.position = self.position.advance(self.num_micro_batches)


class CountsPerRank(GlobalBatchSampler):
    """Each rank saves how many samples it had, and takes that for the count of all ranks of the next run."""

    def state_dict(self):
        mine = self.position.consumed // self._world_size
        stretches = (Stretch(mine, self.position.num_steps, 0), Stretch(0, 0, self.position.global_batch_size))
        return {"record": replace(self.position, stretches=stretches).to_json()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        past, *rest = self.position.stretches
        stretches = (replace(past, num_units=past.num_units * self._world_size), *rest)
        self.position = replace(self.position, stretches=stretches)


class DividesByFloor(GlobalBatchSampler):
    def samples_of(self, position, micro_batch):
        share = position.global_batch_size // self._world_size
        step = range(position.consumed, position.consumed + share * self._world_size)
        start = micro_batch * self._micro_batch_size
        mine = rank_units(step, self._rank, self._world_size)[start : start + self._micro_batch_size]
        return [unit.index for unit in position.units(mine or step[:1])]

    def num_real(self, micro_batch):
        share = self.position.global_batch_size // self._world_size
        return max(0, min(self._micro_batch_size, share - micro_batch * self._micro_batch_size))


PLANS = [
    [Attempt(1, 9, 6, 4, 2, 3), Attempt(1, 9, 6, 4, 4, 0)],
    [Attempt(1, 2, 6, 4, 2, 0), Attempt(1, 2, 6, 4, 4, 0)],
    [Attempt(2, 3, 6, 4, 2, 0), Attempt(3, 2, 6, 4, 4, 0)],
    [Attempt(4, 1, 6, 4, 2, 0), Attempt(4, 1, 6, 4, 4, 0)],
]


@pytest.mark.parametrize(
    ("mutant", "plan"), zip([AdvancesAtFetch, AdvancesPerMicroBatch, CountsPerRank, DividesByFloor], PLANS, strict=True)
)
def test_mutants_are_caught(mutant, plan):
    assert is_the_one_stream(surviving_steps(GlobalBatchSampler, plan))
    try:
        steps = surviving_steps(mutant, plan)
    except AssertionError as error:
        assert "the ranks' states differ" in str(error)
        return
    assert not is_the_one_stream(steps)


class Numbers(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_real_data_loader_resumes_by_what_was_trained_not_by_what_its_workers_fetched(num_workers):
    seen, state = [], None
    for num_steps in (3, 4, 8):
        sampler = GlobalBatchSampler(NUM_SAMPLES, global_batch_size=4, micro_batch_size=3, rank=0, world_size=1)
        if state:
            sampler.load_state_dict(state)
        loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers)
        for number, batch in enumerate(loader, start=1):
            seen += batch.tolist()
            if number % sampler.num_micro_batches == 0:
                sampler.step()
            if number == num_steps * sampler.num_micro_batches:
                break
        state = sampler.state_dict()
    order = DataPosition.begin([DataSource("data", NUM_SAMPLES)], seq_len=1, seed=0, global_batch_size=1)
    assert seen == [unit.index for unit in order.units(range(60))]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_stateful_loader_goes_on_where_its_own_state_stands(num_workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    seen, states = [], {}
    for num_steps in (3, 4, 3):
        sampler = GlobalBatchSampler(NUM_SAMPLES, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1)
        loader = stateful.StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers)
        if states:
            sampler.load_state_dict(states["sampler"])
            loader.load_state_dict(states["loader"])
        for number, batch in enumerate(loader, start=1):
            seen += batch.tolist()
            if number % 2 == 0:
                sampler.step()
            if number == 2 * num_steps:
                states = {"sampler": sampler.state_dict(), "loader": loader.state_dict()}
                break
        assert sampler.position.consumed == len(seen)
    order = DataPosition.begin([DataSource("data", NUM_SAMPLES)], seq_len=1, seed=0, global_batch_size=1)
    assert seen == [unit.index for unit in order.units(range(40))]


def test_the_state_is_saved_and_loaded_by_dcp_as_any_other(tmp_path):
    def make():
        return GlobalBatchSampler(NUM_SAMPLES, global_batch_size=4, rank=0, world_size=1)

    sampler = make()
    sampler.step()
    dcp.save({"data": sampler}, checkpoint_id=tmp_path, no_dist=True)
    resumed = make()
    dcp.load({"data": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert resumed.position == sampler.position
    assert next(iter(resumed)) == next(iter(sampler))


def test_several_sources_give_names_with_their_indices():
    sources = [DataSource("a", 10), DataSource("b", 20)]
    sampler = GlobalBatchSampler(
        sources, global_batch_size=8, rank=1, world_size=2, weights={"a": 1, "b": 1}, num_steps=2
    )
    lists = list(sampler)
    assert [len(samples) for samples in lists] == [4, 4]
    assert {name for samples in lists for name, _ in samples} == {"a", "b"}


def test_the_end_is_counted_in_steps_of_the_whole_run():
    sampler = GlobalBatchSampler(10, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1, num_steps=3)
    sampler.step()
    assert len(sampler) == len(list(sampler)) == 4
    sampler.step()
    assert len(list(sampler)) == 2
    with pytest.raises(TypeError, match="no end"):
        len(GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=1))


def test_a_loop_that_never_counts_its_steps_is_refused_before_it_repeats():
    sampler = GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=1, num_steps=3)
    list(sampler)
    with pytest.raises(UsageError, match=r"step\(\) was not called"):
        iter(sampler)


def test_other_data_another_seed_and_nonsense_are_refused():
    state = GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=1).state_dict()
    with pytest.raises(MismatchError, match="num_units 10 -> 11"):
        GlobalBatchSampler(11, global_batch_size=4, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(MismatchError, match="seed 0 -> 1"):
        GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=1, seed=1).load_state_dict(state)
    sampler = GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=1)
    with pytest.raises(DamagedError):
        sampler.load_state_dict({"epoch": 3})
    with pytest.raises(DamagedError, match="disagree"):
        sampler.load_state_dict(state | {"cursor": torch.ones(8, dtype=torch.int64)})
    with pytest.raises(UsageError, match="rank 0 of 5 can't share a global batch of 4"):
        GlobalBatchSampler(10, global_batch_size=4, rank=0, world_size=5)
