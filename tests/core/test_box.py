import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, exact_cover_fault

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def shape_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes)
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


@given(shape_and_box(), st.data())
def test_intersection_is_the_set_of_common_elements(case: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, box = case
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    other = Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))
    common = box.intersect(other)
    assert (elements(common) if common else set()) == elements(box) & elements(other)


@given(shape_and_box())
def test_contiguous_means_one_run_of_flat_indices(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    flat = sorted(sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(index)) for index in elements(box))
    is_run = flat == list(range(flat[0], flat[0] + len(flat)))
    assert box.flat_start(shape) == flat[0]
    if box.is_contiguous_in(shape):
        assert is_run
    else:
        assert not is_run


@given(shape_and_box(), st.integers(1, 6))
def test_split_rows_covers_the_box_exactly(case: tuple[tuple[int, ...], Box], max_rows: int) -> None:
    _, box = case
    pieces = box.split_rows(max_rows)
    assert sum(piece.num_elements for piece in pieces) == box.num_elements
    assert set().union(*(elements(piece) for piece in pieces)) == elements(box)
    assert all(not piece.sizes or piece.sizes[0] <= max_rows for piece in pieces)


def test_cover_faults_are_named() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert exact_cover_fault(halves, (4, 3)) == ""
    assert "cover 6 of 12" in exact_cover_fault(halves[:1], (4, 3))
    assert "overlap" in exact_cover_fault([*halves, Box((1, 1), (1, 1))], (4, 3))
    assert "outside" in exact_cover_fault([Box((3, 0), (2, 3))], (4, 3))
    assert "cover 0 of 12" in exact_cover_fault([], (4, 3))


def test_scalars_and_empty_tensors_are_covered_by_one_box() -> None:
    assert exact_cover_fault([Box((), ())], ()) == ""
    assert "overlap" in exact_cover_fault([Box((), ()), Box((), ())], ())
    assert exact_cover_fault([Box((0, 0), (0, 7))], (0, 7)) == ""


@given(shape_and_box(), st.data())
def test_covers_are_told_from_near_covers(case: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    """A box and what it leaves of the whole, cut into single elements; then one element moved, doubled or dropped."""
    shape, box = case
    rest = elements(Box.whole(shape)) - elements(box)
    boxes = [box, *(Box(index, (1,) * len(shape)) for index in sorted(rest))]
    assert exact_cover_fault(boxes, shape) == ""
    assert exact_cover_fault(list(reversed(boxes)), shape) == ""
    changed = data.draw(st.sampled_from(boxes))
    assert exact_cover_fault([*boxes, changed], shape) != ""
    assert exact_cover_fault([other for other in boxes if other is not changed], shape) != ""
    if len(boxes) > 2:
        doubled = data.draw(st.sampled_from([b for b in boxes if b is not changed]))
        assert exact_cover_fault([doubled if b is changed else b for b in boxes], shape) != ""


def test_a_cover_of_columns_is_checked_in_linear_time() -> None:
    num_columns = 50_000
    columns = [Box((0, i), (2, 1)) for i in range(num_columns)]
    assert exact_cover_fault(columns, (2, num_columns)) == ""
    columns[7] = columns[9]
    assert "overlap" in exact_cover_fault(columns, (2, num_columns))


def test_chunks_cut_along_more_dims_than_can_be_checked_are_refused() -> None:
    shape = (2,) * 40
    assert "more than can be checked" in exact_cover_fault([Box((0,) * 40, (1,) * 40)] * 2, shape)
