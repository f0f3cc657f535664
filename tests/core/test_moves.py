from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.moves import Move, runs_in_order


@st.composite
def stacked(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, np.ndarray], list[Move]]:
    """A target made of sources that lie at its rows, each a run of rows of a larger tensor, in any order."""
    num, rows, columns, margin = (draw(st.integers(1, 4)) for _ in range(4))
    sources = {
        f"s{i}": 1000 * i + np.arange((rows + margin) * columns).reshape(rows + margin, columns) for i in range(num)
    }
    target = np.stack([source[margin:] for source in sources.values()])
    moves = [
        Move(name, Box((margin, 0), (rows, columns)), Box((i, 0, 0), (1, rows, columns)))
        for i, name in enumerate(sources)
    ]
    return target, sources, draw(st.permutations(moves))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


@given(stacked(), st.integers(1, 7), st.data())
def test_the_pieces_of_any_rows_are_theirs_in_order(made: tuple, max_elements: int, data: st.DataObject) -> None:
    target, sources, given_moves = made
    moves = runs_in_order(given_moves, target.shape)
    assert moves is not None and moves.sources == tuple(sources)
    first = data.draw(st.integers(0, len(target) - 1))
    rows = Box((first, 0, 0), (data.draw(st.integers(1, len(target) - first)), *target.shape[1:]))
    found = []
    for piece, source, box in moves.pieces(rows, lambda box: box.split(max_elements)):
        assert box.num_elements <= max(max_elements, 1)
        assert (cut(target, piece).ravel() == cut(sources[source], box).ravel()).all()
        found += cut(sources[source], box).ravel().tolist()
    assert found == cut(target, rows).ravel().tolist()


def test_holes_overlaps_and_columns_are_no_runs() -> None:
    whole = Box.whole((2, 3))

    def is_run(*boxes: Box) -> bool:
        return runs_in_order([Move("s", Box.whole(box.sizes), box) for box in boxes], (2, 3)) is not None

    assert is_run(whole) and is_run(Box((1, 0), (1, 3)), Box((0, 0), (1, 3)))
    assert not is_run(Box((1, 0), (1, 3)))
    assert not is_run(whole, Box((1, 0), (1, 3)))
    assert not is_run(Box((0, 0), (2, 1)), Box((0, 1), (2, 2)))
    assert not is_run()
