"""The data position: the same units in the same order whatever the world sizes and batch sizes on the way."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.data_source import DataSource
from ckptool.core.history import NOTHING, UNKNOWN, Fed, add_histories, history_of
from ckptool.core.position import DataPosition, Stretch, rank_units, step_units
from ckptool.errors import DamagedError, MismatchError

SOURCE = DataSource("text", 100, {"files": "ab", "num_files": 2})
POSITION = DataPosition.begin([SOURCE], seq_len=128, seed=3, global_batch_size=8)
VERSION_1 = {
    "consumed": 24,
    "fingerprint": {"files": "ab", "num_files": 2},
    "global_batch_size": 8,
    "num_units": 100,
    "order_version": 1,
    "seed": 3,
    "seq_len": 128,
}


def begin(**changes):
    source = {name: changes.pop(name) for name in ("num_units", "fingerprint", "unit_kind") if name in changes}
    settings = {"seq_len": 128, "seed": 3, "global_batch_size": 8} | changes
    return DataPosition.begin([replace(SOURCE, **source)], **settings)


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 70))
def test_ranks_share_a_step_without_gap_or_overlap(consumed, batch_size, world_size):
    units = step_units(consumed, batch_size)
    parts = [rank_units(units, rank, world_size) for rank in range(world_size)]
    assert sorted(g for part in parts for g in part) == list(range(consumed, consumed + batch_size))
    assert all((g - consumed) % world_size == rank for rank, part in enumerate(parts) for g in part)
    assert max(map(len, parts)) == len(parts[0]) <= min(map(len, parts)) + 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=6))
def test_any_history_of_batch_and_world_sizes_feeds_the_one_stream(history):
    position, fed, digests = POSITION, [], [Fed(0)] * 3
    for num_steps, batch_size, world_size in history:
        position = position.with_batch_size(batch_size)
        for _ in range(num_steps):
            parts = [rank_units(position.next_units(), rank, world_size) for rank in range(world_size)]
            fed += sorted(g for part in parts for g in part)
            for rank, part in enumerate(parts):
                digests[rank % 3] = digests[rank % 3].plus((g, position.unit(g)) for g in part)
            position = position.advance()
    assert fed == list(range(position.consumed))
    assert position.num_steps == sum(num_steps for num_steps, _, _ in history)
    whole = history_of(enumerate(POSITION.units(range(position.consumed))))
    assert position.with_history(digests).history == whole != NOTHING


@given(st.integers(1, 40), st.sets(st.integers(0, 60), max_size=2), st.integers(0, 60))
def test_a_history_knows_units_trained_twice_or_never(num_units, left_out, doubled):
    numbers = [g for g in range(num_units) if g not in left_out] + [doubled]
    units = POSITION.units(range(61))
    is_whole = sorted(numbers) == list(range(num_units))
    got, whole = (history_of((g, units[g]) for g in n) for n in (numbers, range(num_units)))
    assert (got == whole) == is_whole


@pytest.mark.parametrize("fed", [range(7), range(9), [0, 1, 2, 3, 4, 5, 6, 7, 7]])
def test_ranks_that_were_fed_another_number_of_units_than_the_position_counts_are_refused(fed):
    parts = [Fed(0).plus((g, POSITION.unit(g)) for g in fed), Fed(0)]
    with pytest.raises(MismatchError, match=f"fed {len(fed)} units, which is not what brings the position to 8"):
        POSITION.advance().with_history(parts)
    with pytest.raises(MismatchError):
        POSITION.advance().with_history([Fed(0, 4), Fed(1, 4)])


def test_golden_digest_of_a_history():
    units = list(enumerate(POSITION.units(range(5))))
    assert history_of(units) == "7c7a3b2c28e2f5813537d6ac1a2decc0"
    assert add_histories([history_of(units[:2]), history_of(units[2:])]) == history_of(units)


def test_a_step_may_span_two_epochs():
    position = POSITION.advance(12)
    assert [unit.epoch for unit in position.units(position.next_units())] == [0] * 4 + [1] * 4


def test_an_epoch_ends_without_replaying_or_dropping():
    first, second = POSITION.units(range(100)), POSITION.units(range(100, 200))
    assert sorted(unit.index for unit in first) == sorted(unit.index for unit in second) == list(range(100))
    assert [unit.index for unit in first] != [unit.index for unit in second]


def test_resumes_in_the_middle_and_at_the_very_end_of_an_epoch_go_on_as_an_uninterrupted_run():
    """Stopped at 30, 10 more, then exactly at 100, saved and read back each time."""
    position, seen = POSITION.with_batch_size(10), []
    for num_steps in (3, 1, 6, 2, 8, 1):
        for _ in range(num_steps):
            seen += position.units(position.next_units())
            position = position.advance()
        position = begin(global_batch_size=10).at(DataPosition.from_json(position.to_json(), "step"))
    assert seen == POSITION.units(range(210))
    assert position.consumed == 210


def test_a_resume_at_a_trillion_units_needs_no_walk_through_them():
    position = begin(num_units=10**9).advance(10**12 // 8)
    again = begin(num_units=10**9).at(DataPosition.from_json(position.to_json(), "x"))
    assert again.consumed == 10**12
    assert {unit.epoch for unit in again.units(again.next_units())} == {1000}


def test_the_record_is_canonical_and_comes_back():
    position = POSITION.advance(3).with_batch_size(5).advance()
    record = position.to_json()
    assert record == (
        '{"consumed":29,"edits":[],"history":"00000000000000000000000000000000","record_version":2,"segments":'
        '[{"done":{},"order_version":2,"phase":0,"seed":3,"seq_len":128,"slots":[1024],"sources":[{"fingerprint":'
        '{"files":"ab","num_files":2},"name":"text","num_units":100,"unit_kind":"window"}],"start":0}],"stretches":'
        '[{"global_batch_size":8,"num_steps":3,"num_units":24},{"global_batch_size":5,"num_steps":1,"num_units":5}]}'
    )
    assert DataPosition.from_json(record, "x") == position
    assert position.cursor() == [29, 2, 0, 0, 0, 0, 0, 0]


def test_a_record_of_version_1_goes_on_in_its_own_order():
    record = DataPosition.from_json(json.dumps(VERSION_1), "x", num_steps=3)
    assert record.history == UNKNOWN
    assert (record.consumed, record.num_steps, record.cursor()) == (24, 3, [24, 1, 0, 0, 0, 0, 0, 0])
    resumed = POSITION.at(record)
    assert [unit.index for unit in resumed.units(range(24, 27))] == [75, 74, 96]
    assert {unit.source for unit in resumed.units(range(24, 27))} == {"text"}
    again = DataPosition.from_json(resumed.advance().to_json(), "x")
    assert POSITION.at(again) == again
    assert again.num_steps == 4


def test_a_record_of_version_1_with_steps_of_unknown_sizes():
    record = DataPosition.from_json(json.dumps(VERSION_1), "x", num_steps=5)
    assert record.stretches == (Stretch(24, 5, 0), Stretch(0, 0, 8))
    assert DataPosition.from_json(record.advance().to_json(), "x") == record.advance()


def test_another_batch_size_goes_on_where_the_record_stands():
    resumed = begin(global_batch_size=5).at(POSITION.advance(2))
    assert resumed.next_units() == range(16, 21)
    assert resumed.advance().stretches == (Stretch(16, 2, 8), Stretch(5, 1, 5))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 4}, "seed 3 -> 4"),
        ({"seq_len": 64}, "seq_len 128 -> 64"),
        ({"num_units": 99}, "text.num_units 100 -> 99"),
        ({"unit_kind": "ffd-block"}, "text.unit_kind window -> ffd-block"),
        ({"fingerprint": {"files": "cd", "num_files": 2}}, "text.files ab -> cd"),
        ({"fingerprint": {"files": "ab"}}, "text.num_files 2 -> None"),
    ],
)
def test_another_stream_is_refused_with_the_difference(change, difference):
    with pytest.raises(MismatchError) as caught:
        begin(**change).at(POSITION)
    assert str(caught.value).endswith(f": {difference}")


def test_another_mixture_is_refused_with_the_difference():
    other = DataPosition.begin(
        [SOURCE, DataSource("more", 5)], seq_len=128, seed=3, global_batch_size=8, weights={"text": 3, "more": 1}
    )
    with pytest.raises(MismatchError, match=r"sources text -> more, text; .*slots of text 1024 -> 768"):
        other.at(POSITION)


V2 = json.loads(POSITION.advance().to_json())
SEGMENT, SOURCE_RECORD = V2["segments"][0], V2["segments"][0]["sources"][0]


@pytest.mark.parametrize(
    "record",
    [
        VERSION_1 | {"consumed": -1},
        VERSION_1 | {"consumed": "7"},
        VERSION_1 | {"num_units": 0},
        VERSION_1 | {"fingerprint": 3},
        VERSION_1 | {"seq_len": True},
        VERSION_1 | {"order_version": 2},
        {"consumed": 1},
        [1],
        V2 | {"record_version": 3},
        V2 | {"consumed": 9},
        V2 | {"history": "0"},
        V2 | {"segments": []},
        V2 | {"stretches": []},
        V2 | {"stretches": [{"num_units": 9, "num_steps": 1, "global_batch_size": 8}]},
        V2 | {"stretches": [{"num_units": 8, "num_steps": 1, "global_batch_size": 0}]},
        V2 | {"segments": [SEGMENT, SEGMENT]},
        V2 | {"segments": [SEGMENT | {"start": 1}]},
        V2 | {"segments": [SEGMENT | {"slots": [1023]}]},
        V2 | {"segments": [SEGMENT | {"slots": [512, 512]}]},
        V2 | {"segments": [SEGMENT | {"order_version": 3}]},
        V2 | {"segments": [SEGMENT | {"sources": []}]},
        V2 | {"segments": [SEGMENT | {"sources": [SOURCE_RECORD | {"unit_kind": "line"}]}]},
        V2 | {"segments": [SEGMENT | {"sources": [SOURCE_RECORD | {"name": ""}]}]},
        V2 | {"segments": [SEGMENT | {"sources": [SOURCE_RECORD, SOURCE_RECORD], "slots": [512, 512]}]},
        V2 | {"edits": [{"action": 3}]},
    ],
)
def test_a_damaged_record_is_refused(record):
    with pytest.raises(DamagedError, match=r"^step-5: "):
        DataPosition.from_json(json.dumps(record), "step-5")
