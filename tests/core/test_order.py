"""The order of units: golden vectors fix it for ever, properties say what it must be."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core import order_v1
from ckptool.core.order import MAX_SORTED_UNITS, ORDER_VERSION, unit_indices


def old_order(seed, epoch, num_units, places):
    return [order_v1.unit_index(seed, epoch, num_units, i) for i in places]


def test_golden_vectors_of_order_version_2():
    assert ORDER_VERSION == 2
    assert unit_indices(0, "a", 0, 10, range(10)) == [5, 9, 1, 7, 0, 8, 6, 4, 3, 2]
    assert unit_indices(7, "b", 3, 10, range(10)) == [1, 9, 2, 0, 7, 3, 4, 8, 6, 5]
    assert unit_indices(0, "a", 0, 65536, range(6)) == [6434, 61419, 37974, 35606, 54139, 15225]
    assert unit_indices(0, "a", 0, 65537, range(6)) == [5378, 49972, 3157, 37582, 7321, 47648]
    assert unit_indices(-3, 'naïve "x"', 1, 10**12, range(4)) == [708752305679, 53642187256, 476571111683, 970619042044]
    assert unit_indices(1, "a", 2, (1 << 63) - 1, [0, 10**12]) == [5593752787806524528, 5619741021259822200]


def test_golden_vectors_of_order_version_1():
    assert order_v1.ORDER_VERSION == 1
    assert old_order(0, 0, 10, range(10)) == [6, 5, 8, 0, 1, 4, 7, 3, 2, 9]
    assert old_order(7, 3, 10, range(10)) == [8, 3, 6, 1, 9, 5, 0, 2, 4, 7]
    assert old_order(0, 0, 65537, range(6)) == [56996, 60066, 47954, 20971, 22882, 45410]
    assert old_order(0, 1, 10**12, range(4)) == [386513003556, 577680182670, 829816908818, 632245795325]


@given(st.integers(-5, 2**64), st.integers(0, 2**40), st.integers(1, 300), st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_each_epoch_holds_every_unit_once(seed, epoch, num_units, source):
    assert sorted(unit_indices(seed, source, epoch, num_units, range(num_units))) == list(range(num_units))
    assert sorted(old_order(seed, epoch, num_units, range(num_units))) == list(range(num_units))


@pytest.mark.parametrize("num_units", [MAX_SORTED_UNITS + 1, 10**6, 10**12, 2**62])
def test_a_long_epoch_repeats_no_unit(num_units):
    places = [*range(2000), *range(num_units - 2000, num_units)]
    for seen in (unit_indices(3, "a", 0, num_units, places), old_order(3, 0, num_units, places)):
        assert len(set(seen)) == 4000
        assert all(0 <= index < num_units for index in seen)


@pytest.mark.parametrize("num_units", [MAX_SORTED_UNITS + 1, 99_999])
def test_a_whole_long_epoch_holds_every_unit_once_and_looks_random(num_units):
    order = unit_indices(1, "a", 0, num_units, range(num_units))
    assert sorted(order) == list(range(num_units))
    for pairs in (enumerate(order), pairwise(order)):
        cells = Counter((a * 16 // num_units, b * 16 // num_units) for a, b in pairs)
        expected = num_units / 256
        chi_square = sum((cells[a, b] - expected) ** 2 / expected for a in range(16) for b in range(16))
        assert abs(chi_square - 225) < 6 * math.sqrt(2 * 225)  # 15 * 15 degrees of freedom


@pytest.mark.slow
def test_a_whole_long_epoch_of_version_1_holds_every_unit_once():
    num_units = MAX_SORTED_UNITS + 1
    assert sorted(old_order(1, 0, num_units, range(num_units))) == list(range(num_units))


def test_seed_source_epoch_and_size_each_change_the_order():
    base = unit_indices(0, "a", 0, 1000, range(100))
    assert unit_indices(1, "a", 0, 1000, range(100)) != base
    assert unit_indices(0, "b", 0, 1000, range(100)) != base
    assert unit_indices(0, "a", 1, 1000, range(100)) != base
    assert unit_indices(0, "a", 0, 1001, range(100)) != base


def test_a_place_outside_the_epoch_is_refused():
    for place in (-1, 10):
        with pytest.raises(IndexError):
            unit_indices(0, "a", 0, 10, [place])
        with pytest.raises(IndexError):
            order_v1.unit_index(0, 0, 10, place)
