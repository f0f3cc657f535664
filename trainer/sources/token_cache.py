"""Rows to tokens, once: pieces made by several processes, kept when the run is killed, published all together."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.sources.chat import chat_documents
from trainer.sources.documents import Table, text_documents
from trainer.sources.tokenizer import load_tokenizer, token_dtype

#: A source is cut into at most this many pieces, of at least MIN_PIECE_ROWS rows.
MAX_PIECES = 4096
MIN_PIECE_ROWS = 1024
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Recipe:
    """How rows become tokens: the same for all pieces."""

    kind: str
    field: str
    hf_folder: Path
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a table. Its files are `stem` with `.tokens`, `.trained` (chat only) and `.lengths`.

    `.lengths` (int64, tokens of each document) is written last: with it, the piece is whole.
    """

    table: int
    start: int
    stop: int
    stem: Path

    def is_done(self) -> bool:
        return self.stem.with_suffix(".lengths").is_file()


@contextmanager
def sole_builder(folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The hidden folder beside `folder` to build it in, held for this process alone. A killed holder lets go of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that tokenizes the same data")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder.parent / f".{folder.name}.partial"


def cut_into_pieces(tables: tuple[Table, ...], folder: Path) -> list[Piece]:
    """The same pieces for the same tables, whatever the number of processes."""
    num_rows = sum(len(table.rows) for table in tables)
    size = max(MIN_PIECE_ROWS, -(-num_rows // MAX_PIECES))
    ranges = [
        (t, start, len(table.rows)) for t, table in enumerate(tables) for start in range(0, len(table.rows), size)
    ]
    return [
        Piece(table, start, min(start + size, end), folder / f"piece-{number:05}")
        for number, (table, start, end) in enumerate(ranges)
    ]


def make_pieces(recipe: Recipe, pieces: list[Piece], say: Callable[[str], None]) -> None:
    """Tokenize the pieces that are not done, on all cores when there are several. Raises what a piece raises."""
    left = [piece for piece in pieces if not piece.is_done()]
    if len(left) < len(pieces):
        say(f"{len(pieces) - len(left)} of {len(pieces)} pieces are there from an earlier run")
    num_workers = min(len(left), len(os.sched_getaffinity(0)))
    num_replaced = 0
    for number, count in enumerate(_outcomes(recipe, left, num_workers)):
        num_replaced += count
        if number == 0:
            began = reported = time.monotonic()  # the workers have started, and one piece is done
        elif time.monotonic() - reported > _SECONDS_BETWEEN_LINES:
            reported = time.monotonic()
            rest = (reported - began) / number * (len(left) - number - 1)
            say(f"tokenized {number + 1} of {len(left)} pieces on {num_workers} cores, about {rest:.0f} s to go")
    if num_replaced:
        say(f"note: {num_replaced} documents hold U+FFFD; bytes that are not UTF-8 are read as that")


def _outcomes(recipe: Recipe, pieces: list[Piece], num_workers: int) -> Iterator[int]:
    if num_workers <= 1:
        tokenizer = load_tokenizer(recipe.hf_folder)
        for piece in pieces:
            yield _make(recipe, tokenizer, piece)
        return
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(recipe,)
    )
    futures: list[Future[int]] = [pool.submit(_make_in_worker, piece) for piece in pieces]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(recipe: Recipe) -> None:
    """Each process has its own tokenizer, with one thread, and ends when its parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(recipe=recipe, tokenizer=load_tokenizer(recipe.hf_folder))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make_in_worker(piece: Piece) -> int:
    return _make(_worker["recipe"], _worker["tokenizer"], piece)


def _make(recipe: Recipe, tokenizer: Any, piece: Piece) -> int:
    """Write one piece; returns how many of its documents hold U+FFFD."""
    dtype = token_dtype(tokenizer)
    table = recipe.tables[piece.table]
    tokens, trained, num_replaced = [], [], 0
    if recipe.kind == "chat":
        for document in chat_documents(tokenizer, table, piece.start, piece.stop):
            tokens.append(np.array(document.tokens, dtype))
            trained.append(np.array(document.trained, np.uint8))
        _write(piece, ".trained", trained)
    else:
        for document, is_replaced in text_documents(tokenizer, table, recipe.field, piece.start, piece.stop):
            tokens.append(np.array(document.tokens, dtype))
            num_replaced += is_replaced
    _write(piece, ".tokens", tokens)
    _write(piece, ".lengths", [np.array([len(document) for document in tokens], np.int64)])
    return num_replaced


def _write(piece: Piece, suffix: str, arrays: list[np.ndarray]) -> None:
    temporary = piece.stem.with_suffix(f"{suffix}.tmp")
    with temporary.open("wb") as out:
        for array in arrays:
            out.write(array.tobytes())
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(piece.stem.with_suffix(suffix))
