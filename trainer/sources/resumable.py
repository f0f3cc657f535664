"""Does a streaming data set of `datasets` go on where it stood? Found out by trying."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

from ckptool import UnsupportedError

#: Rows after which the self-test saves, resumes, saves and resumes again.
_STOPS = (5, 12, 19)


def check_resumable(opened: Callable[[], Any], name: str) -> str:
    """Read some rows at once and with two resumes between them; returns a digest of them.

    Raises UnsupportedError when that is not the same: in several versions of `datasets`, and with `map` or `filter`, a
    state that was saved after a resume, or inside a batch of rows, is wrong (datasets#7901, #8145, #8308). So it does
    for a shuffle by a buffer, whatever its size: it is lost with the first resume after half of it was given.
    """
    if (buffer_size := _shuffle_buffer(opened())) > 1:
        raise UnsupportedError(
            f"{name}: this data set is shuffled by a buffer of {buffer_size} rows, which is lost on resume",
            hint=f"shuffle = {buffer_size} in a TOML file, instead: it can be resumed",
        )
    whole = list(islice(opened(), _STOPS[-1]))
    pieces: list[Any] = []
    state = None
    for start, stop in zip((0, *_STOPS), _STOPS, strict=False):
        data_set = opened()
        if state is not None:
            data_set.load_state_dict(state)
        pieces += islice(data_set, stop - start)
        state = json.loads(json.dumps(data_set.state_dict()))
    if pieces != whole:
        wrong = next((n for n, (a, b) in enumerate(zip(whole, pieces, strict=False)) if a != b), len(pieces))
        raise UnsupportedError(
            f"{name}: this data set can't be resumed: with two resumes row {wrong} is another one",
            hint="another version of the datasets library; no map or filter; or an indexed source (hf:)",
        )
    return hashlib.blake2b(json.dumps(whole, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _shuffle_buffer(data_set: Any) -> int:
    """The rows of the largest shuffle buffer inside a data set of `datasets`, by its classes; 0 when there is none."""
    largest = 0
    pending: list[Any] = [getattr(data_set, "_ex_iterable", None)]
    while pending:
        part = pending.pop()
        if type(part).__name__.startswith("BufferShuffled"):
            largest = max(largest, getattr(part, "buffer_size", 0))
        pending += [part.ex_iterable] if hasattr(part, "ex_iterable") else []
        pending += getattr(part, "ex_iterables", [])
    return largest
