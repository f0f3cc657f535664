"""Changes of the stream: what was trained stays as it was, and each source goes on where it stands."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.core.position_edits import Jump, accept_data_change, jump, place_of, redefine
from ckptool.errors import UsageError

A, B, C = DataSource("a", 40, {"tokens": "x"}), DataSource("b", 90), DataSource("c", 11)


def mixture(*sources, weights=None, seq_len=16, seed=0, batch=6):
    weights = weights or {source.name: 1 for source in sources}
    return DataPosition.begin(sources, seq_len=seq_len, seed=seed, global_batch_size=batch, weights=weights)


def of_source(units, name):
    return [unit[:2] for unit in units if unit.source == name]


@given(st.integers(0, 400), st.integers(0, 600), st.integers(1, 9))
def test_changed_weights_rewrite_nothing_and_each_source_goes_on(before, after, weight):
    position = mixture(A, B, batch=1).advance(before)
    changed, changes = redefine(position, mixture(A, B, weights={"a": weight, "b": 10}).segment)
    assert len(changes) == 2
    end = before + after
    assert changed.units(range(before)) == position.units(range(before))
    assert DataPosition.from_json(changed.to_json(), "x") == changed
    for source in (A, B):
        seen = of_source(changed.units(range(end)), source.name)
        alone = mixture(source).units(range(len(seen)))
        assert seen == [unit[:2] for unit in alone]


def test_an_added_source_comes_in_from_its_start_and_a_removed_one_comes_back_where_it_stood():
    first = mixture(A, batch=100).advance()
    second = redefine(first, mixture(A, C).segment)[0].advance(2)
    third = redefine(second, mixture(A).segment)[0].advance()
    fourth = redefine(third, mixture(A, C).segment)[0]
    units = fourth.units(range(1000))
    assert {unit.source for unit in units[:100]} == {unit.source for unit in units[300:400]} == {"a"}
    for source in (A, C):
        seen = of_source(units, source.name)
        assert seen == [unit[:2] for unit in mixture(source).units(range(len(seen)))]


def test_a_source_with_other_units_begins_its_next_epoch_and_says_what_is_left_out():
    position = mixture(A, batch=50).advance()
    grown = replace(A, num_units=45, fingerprint={"tokens": "y"})
    changed, changes = redefine(position, mixture(grown).segment)
    assert changes == ["a.num_units 40 -> 45", "a.tokens x -> y", "a: 30 of 40 units of epoch 1 are left out"]
    units = changed.units(range(50, 95))
    assert {unit.epoch for unit in units} == {2}
    assert sorted(unit.index for unit in units) == list(range(45))
    exactly = mixture(A, batch=40).advance(2)
    assert redefine(exactly, mixture(grown).segment)[1] == changes[:2]


def test_another_sequence_length_is_a_segment_of_its_own():
    position = mixture(A, batch=40).advance()
    changed, changes = redefine(position, mixture(replace(A, num_units=80), seq_len=8).segment)
    assert changes == ["a.num_units 40 -> 80", "seq_len 16 -> 8"]
    assert [segment.seq_len for segment in changed.segments] == [16, 8]
    assert [unit.epoch for unit in changed.units(range(39, 42))] == [0, 1, 1]


def test_a_definition_that_is_there_already_is_refused():
    with pytest.raises(UsageError, match="already"):
        redefine(mixture(A).advance(), mixture(A).segment)


def test_changed_data_is_accepted_with_a_reason_and_recorded():
    record = mixture(A).advance(2)
    offered = mixture(replace(A, fingerprint={"tokens": "y"}), batch=7)
    position = accept_data_change(offered, record, reason="a typo was corrected", when="2026-01-01T00:00:00+00:00")
    (edit,) = position.edits
    assert (edit.action, edit.unit, edit.step, edit.reason) == ("accept-data-change", 12, 2, "a typo was corrected")
    assert edit.changes == ("a.tokens x -> y", "a: 28 of 40 units of epoch 0 are left out")
    assert offered.at(position) == position
    assert DataPosition.from_json(position.to_json(), "x") == position
    assert accept_data_change(mixture(A), record, reason="none", when="").edits == ()


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 50))
def test_a_seek_goes_on_with_the_very_units_of_that_place(consumed, target, more):
    position = mixture(A, B, batch=1).advance(consumed)
    if target == consumed:
        with pytest.raises(UsageError, match="already"):
            jump(position, consumed, place_of(position, target))
        return
    moved, effect = jump(position, consumed, place_of(position, target))
    assert moved.units(range(consumed)) == position.units(range(consumed))
    assert moved.units(range(consumed, consumed + more)) == position.units(range(target, target + more))
    assert effect == Jump(max(0, consumed - target), max(0, target - consumed))
    assert (moved.consumed, moved.num_steps) == (position.consumed, position.num_steps)
    assert DataPosition.from_json(moved.to_json(), "x") == moved


def test_a_skip_ahead_leaves_out_exactly_that_range():
    position = mixture(A, B).advance(2)
    moved, effect = jump(position, 100, place_of(position, 130))
    assert effect == Jump(0, 30)
    assert moved.units(range(250)) == position.units(range(100)) + position.units(range(130, 280))
    with pytest.raises(UsageError, match="still ahead"):
        redefine(moved, mixture(A).segment)
    with pytest.raises(UsageError, match="still ahead"):
        jump(moved, 50, 70)
    later = moved.advance(20)
    assert redefine(later, mixture(A).segment)[0].units(range(132)) == moved.units(range(132))


def test_what_was_trained_can_not_be_skipped_nor_found_before_a_change():
    position = redefine(mixture(A, B).advance(10), mixture(A).segment)[0].advance()
    with pytest.raises(UsageError, match="unit 5 is trained already"):
        jump(position, 5, 9)
    with pytest.raises(UsageError, match="unit 59 lies before unit 60, where the data or its mixture was changed"):
        place_of(position, 59)
    assert place_of(position, 60) == 0


def test_a_second_change_before_any_step_takes_the_place_of_the_first():
    position = mixture(A, B).advance(3)
    once = redefine(position, mixture(A, B, weights={"a": 1, "b": 3}).segment)[0]
    twice = redefine(once, mixture(A, B, weights={"a": 3, "b": 1}).segment)[0]
    assert [segment.slots for segment in twice.segments] == [(512, 512), (768, 256)]
    assert Counter(unit.source for unit in twice.units(range(18, 18 + 1024))) == Counter(a=768, b=256)
