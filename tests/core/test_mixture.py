"""Mixtures: whole slots in blocks of 1024, so that every source advances exactly by its share."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.data_source import DataSource
from ckptool.core.mixture import BLOCK_SLOTS, block_layout, slots_of
from ckptool.core.position import DataPosition
from ckptool.core.position_edits import redefine
from ckptool.errors import UsageError

SOURCES = [DataSource("b", 100), DataSource("a", 70_000), DataSource("c", 7)]
WEIGHTS = {"a": 6, "b": 3, "c": 1}


def mixed(sources=SOURCES, weights=WEIGHTS, seed=0):
    return DataPosition.begin(sources, seq_len=8, seed=seed, global_batch_size=4, weights=weights)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9))
def test_slots_fill_a_block_and_are_off_by_less_than_one(weights):
    total = sum(weights)
    try:
        slots = slots_of({str(i): weight for i, weight in enumerate(weights)})
    except UsageError:
        assert min(weights) / total * BLOCK_SLOTS < 1
        return
    assert sum(slots) == BLOCK_SLOTS
    assert all(abs(count - weight / total * BLOCK_SLOTS) < 1 for count, weight in zip(slots, weights, strict=True))


@pytest.mark.parametrize(
    "weights", [{"a": 0.0, "b": 1}, {"a": -1, "b": 1}, {"a": float("nan")}, {"a": float("inf")}, {}]
)
def test_weights_that_are_not_positive_numbers_are_refused(weights):
    with pytest.raises(UsageError):
        slots_of(weights)


def test_a_weight_too_small_for_a_slot_is_refused_by_name():
    with pytest.raises(UsageError, match="the weight of rare is 1e-06 of all"):
        slots_of({"common": 1, "rare": 1e-6})


def test_golden_vectors_of_blocks():
    assert block_layout(0, 0, 0, (600, 300, 124))[0][:24] == [int(source) for source in "110100000101000010210110"]
    assert block_layout(5, 2048, 10**9, (600, 300, 124))[0][:24] == [
        int(source) for source in "100021011001012220201002"
    ]


@given(st.integers(0, 10**12), st.integers(0, 3000))
def test_each_source_is_trained_in_its_own_order_without_gap(start, num_units):
    position = mixed()
    units = position.units(range(start, start + num_units))
    before, after = position.segment.done_before(start), position.segment.done_before(start + num_units)
    for source in SOURCES:
        alone = DataPosition.begin([source], seq_len=8, seed=0, global_batch_size=4)
        expected = alone.units(range(before[source.name], after[source.name]))
        assert [unit for unit in units if unit.source == source.name] == expected


@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 1500), st.sampled_from([1, 3]))
def test_a_ranks_part_is_its_part_of_the_whole(start, num_units, step, num_sources):
    position = mixed(SOURCES[:num_sources], dict.fromkeys("bac"[:num_sources], 1)).advance(700)
    changed, _ = redefine(position, mixed(SOURCES[:1], None, seed=1).segment)
    numbers = range(start, start + num_units)
    assert changed.units(numbers[::step]) == changed.units(numbers)[::step]


def test_every_block_holds_the_exact_shares_and_blocks_differ():
    position = mixed()
    blocks = [[unit.source for unit in position.units(range(k * 1024, (k + 1) * 1024))] for k in range(3)]
    assert [Counter(block) for block in blocks] == [Counter(a=614, b=307, c=103)] * 3
    assert blocks[0] != blocks[1] != blocks[2]


def test_the_order_in_which_sources_are_given_means_nothing():
    assert mixed(SOURCES[::-1]) == mixed()
    assert mixed(weights={"a": 60, "b": 30, "c": 10}) == mixed()


def test_without_weights_sources_are_mixed_by_their_size():
    position = mixed([DataSource("a", 300), DataSource("b", 100)], weights=None)
    assert position.segment.slots == (768, 256)


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ([], None, "no sources"),
        ([DataSource("a", 1), DataSource("a", 2)], None, "one name"),
        ([DataSource("a", 1), DataSource("b", 0)], None, "b has no units"),
        ([DataSource("a", 1), DataSource("b", 1)], {"a": 1}, "not of the same names: b"),
        ([DataSource("a", 1)], {"a": 1, "c": 1}, "not of the same names: c"),
        ([DataSource("a", 1)], {"a": -1}, "not a positive number"),
    ],
)
def test_impossible_mixtures_are_refused(sources, weights, message):
    with pytest.raises(UsageError, match=message):
        mixed(sources, weights)
