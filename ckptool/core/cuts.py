"""Where an import cuts a tensor's rows into chunks.

DTensor gives rank r of W the rows [r * ceil(n / W), (r + 1) * ceil(n / W)) (torch.chunk's rule), and stock DCP readers
read every stored chunk that their rows touch, whole. Cuts at those row numbers make each rank read only its own bytes.
"""

from __future__ import annotations

import bisect
import itertools
import math

from ckptool.core.box import Box
from ckptool.core.tensors import Chunk, TensorEntry

#: World sizes whose row splits the cuts follow, most usual first, and the smallest chunk that a cut for them may leave;
#: a cut too close to an earlier one is dropped. A chunk costs about 1.3 kB of archive around it: for the powers of two,
#: whose cuts nest, that is worth more than reading bytes of another rank.
WORLD_SIZES = {2: 8 << 10, 4: 8 << 10, 8: 8 << 10, 16: 8 << 10, 3: 32 << 10, 6: 32 << 10, 5: 32 << 10, 7: 32 << 10}


def row_cuts(num_rows: int, row_bytes: int, max_chunk_bytes: int) -> list[int]:
    """Ascending row numbers to cut before, each in (0, num_rows).

    Chunks get at most `max_chunk_bytes` (or one row, when a row is larger), and at least what `WORLD_SIZES` has unless
    the upper bound asks for less.
    """
    max_rows = max(1, max_chunk_bytes // max(1, row_bytes))
    edges = [0, num_rows]
    for world_size, min_chunk_bytes in WORLD_SIZES.items():
        min_rows = min(max_rows, max(1, math.ceil(min_chunk_bytes / max(1, row_bytes))))
        rows_per_rank = math.ceil(num_rows / world_size)
        for edge in range(rows_per_rank, num_rows, rows_per_rank):
            place = bisect.bisect_left(edges, edge)
            if edge - edges[place - 1] >= min_rows and edges[place] - edge >= min_rows:
                edges.insert(place, edge)
    cuts: list[int] = []
    for a, b in itertools.pairwise(edges):
        pieces = math.ceil((b - a) / max_rows)
        cuts.extend(a + (b - a) * piece // pieces for piece in range(pieces) if a + (b - a) * piece // pieces > 0)
    return cuts


def cut_tensor(fqn: str, dtype: str, shape: tuple[int, ...], max_chunk_bytes: int) -> TensorEntry:
    """A target entry whose chunks are dim-0 blocks cut by `row_cuts`. 0-d and empty tensors are one chunk."""
    whole = TensorEntry(fqn, dtype, shape, (Chunk(Box.whole(shape)),))
    if not shape or whole.num_elements == 0:
        return whole
    cuts = row_cuts(shape[0], whole.num_bytes // shape[0], max_chunk_bytes)
    return TensorEntry(fqn, dtype, shape, tuple(Chunk(box) for box in Box.whole(shape).cut_rows(cuts)))


def stream_tensor(fqn: str, dtype: str, shape: tuple[int, ...], max_piece_bytes: int) -> TensorEntry:
    """A target entry for formats that store tensors whole: plain row blocks of at most `max_piece_bytes`."""
    entry = TensorEntry(fqn, dtype, shape, ())
    if not shape or entry.num_elements == 0:
        return TensorEntry(fqn, dtype, shape, (Chunk(Box.whole(shape)),))
    max_rows = max(1, max_piece_bytes // (entry.num_bytes // shape[0]))
    return TensorEntry(fqn, dtype, shape, tuple(Chunk(box) for box in Box.whole(shape).split_rows(max_rows)))
