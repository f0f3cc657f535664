"""The data position: the same units in the same order whatever the world sizes and batch sizes on the way."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.position import DataPosition, rank_units, step_units
from ckptool.errors import DamagedError, MismatchError

POSITION = DataPosition(
    num_units=100, seq_len=128, seed=3, global_batch_size=8, fingerprint={"files": "ab", "num_files": 2}
)


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 70))
def test_ranks_share_a_step_without_gap_or_overlap(consumed, batch_size, world_size):
    units = step_units(consumed, batch_size)
    parts = [rank_units(units, rank, world_size) for rank in range(world_size)]
    assert sorted(g for part in parts for g in part) == list(range(consumed, consumed + batch_size))
    assert all((g - consumed) % world_size == rank for rank, part in enumerate(parts) for g in part)
    assert max(map(len, parts)) == len(parts[0]) <= min(map(len, parts)) + 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=6))
def test_any_history_of_batch_and_world_sizes_feeds_the_one_stream(history):
    position, fed = POSITION, []
    for num_steps, batch_size, world_size in history:
        position = replace(position, global_batch_size=batch_size)
        for _ in range(num_steps):
            parts = [rank_units(position.next_units(), rank, world_size) for rank in range(world_size)]
            fed += sorted(g for part in parts for g in part)
            position = position.advance(batch_size)
    assert fed == list(range(position.consumed))


def test_a_step_may_span_two_epochs():
    units = [replace(POSITION, consumed=96).unit(g) for g in replace(POSITION, consumed=96).next_units()]
    assert [epoch for epoch, _ in units] == [0] * 4 + [1] * 4


def test_an_epoch_ends_without_replaying_or_dropping():
    stop_at_30 = [POSITION.unit(g) for g in range(30)] + [POSITION.unit(g) for g in range(30, 100)]
    assert sorted(index for _, index in stop_at_30) == list(range(100))
    assert sorted(POSITION.unit(g)[1] for g in range(100, 200)) == list(range(100))
    assert [POSITION.unit(g)[1] for g in range(100, 200)] != [index for _, index in stop_at_30]


def test_the_record_is_canonical_and_comes_back():
    record = POSITION.advance(24).to_json()
    assert record == (
        '{"consumed":24,"fingerprint":{"files":"ab","num_files":2},"global_batch_size":8,"num_units":100,'
        '"order_version":1,"seed":3,"seq_len":128}'
    )
    assert DataPosition.from_json(record, "x") == POSITION.advance(24)
    assert POSITION.advance(24).cursor() == [24, 1, 0, 0, 0, 0, 0, 0]


def test_another_batch_size_goes_on_where_the_record_stands():
    resumed = replace(POSITION, global_batch_size=5).at(POSITION.advance(16))
    assert resumed.next_units() == range(16, 21)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 4}, "seed 3 -> 4"),
        ({"seq_len": 64}, "seq_len 128 -> 64"),
        ({"num_units": 99}, "num_units 100 -> 99"),
        ({"order_version": 2}, "order_version 1 -> 2"),
        ({"fingerprint": {"files": "cd", "num_files": 2}}, "source.files ab -> cd"),
        ({"fingerprint": {"files": "ab"}}, "source.num_files 2 -> None"),
    ],
)
def test_another_stream_is_refused_with_the_difference(change, difference):
    with pytest.raises(MismatchError) as caught:
        replace(POSITION, **change).at(POSITION)
    assert str(caught.value).endswith(f": {difference}")


@pytest.mark.parametrize(
    "change", [{"consumed": -1}, {"consumed": "7"}, {"num_units": 0}, {"fingerprint": 3}, {"seq_len": True}]
)
def test_a_damaged_record_is_refused(change):
    with pytest.raises(DamagedError, match=r"^step-5: "):
        DataPosition.from_json(json.dumps(json.loads(POSITION.to_json()) | change), "step-5")
    with pytest.raises(DamagedError):
        DataPosition.from_json('{"consumed":1}', "step-5")
    with pytest.raises(DamagedError):
        DataPosition.from_json("[1]", "step-5")
