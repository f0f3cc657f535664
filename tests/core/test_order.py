"""The order of units: golden vectors fix it for ever, properties say what it must be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core.order import MAX_SORTED_UNITS, ORDER_VERSION, unit_index


def order(seed, epoch, num_units, places):
    return [unit_index(seed, epoch, num_units, i) for i in places]


def test_golden_vectors_of_order_version_1():
    assert ORDER_VERSION == 1
    assert order(0, 0, 10, range(10)) == [6, 5, 8, 0, 1, 4, 7, 3, 2, 9]
    assert order(7, 3, 10, range(10)) == [8, 3, 6, 1, 9, 5, 0, 2, 4, 7]
    assert order(0, 0, 65537, range(6)) == [56996, 60066, 47954, 20971, 22882, 45410]
    assert order(0, 1, 10**12, range(4)) == [386513003556, 577680182670, 829816908818, 632245795325]


@given(st.integers(-5, 2**64), st.integers(0, 2**40), st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_each_epoch_holds_every_unit_once(seed, epoch, num_units):
    assert sorted(order(seed, epoch, num_units, range(num_units))) == list(range(num_units))


@pytest.mark.parametrize("num_units", [MAX_SORTED_UNITS + 1, 10**6, 10**12])
def test_a_long_epoch_repeats_no_unit(num_units):
    seen = order(3, 0, num_units, range(2000)) + order(3, 0, num_units, range(num_units - 2000, num_units))
    assert len(set(seen)) == 4000
    assert all(0 <= index < num_units for index in seen)


@pytest.mark.slow
def test_a_whole_long_epoch_holds_every_unit_once():
    num_units = MAX_SORTED_UNITS + 1
    assert sorted(order(1, 0, num_units, range(num_units))) == list(range(num_units))


def test_seed_epoch_and_size_each_change_the_order():
    base = order(0, 0, 1000, range(100))
    assert order(1, 0, 1000, range(100)) != base
    assert order(0, 1, 1000, range(100)) != base
    assert order(0, 0, 1001, range(100)) != base


def test_a_place_outside_the_epoch_is_refused():
    for place in (-1, 10):
        with pytest.raises(IndexError):
            unit_index(0, 0, 10, place)
