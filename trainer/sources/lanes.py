"""Streaming data sets as a fixed number of lanes: whichever rank reads a lane, it is read in the same order.

A lane is `split_dataset_by_node(data_set, lane, num_lanes)`, its documents joined and cut into windows. The number of
lanes, not the world size, decides which rows a lane has, so lanes move between ranks. A lane's state is the data set's
own, and the tokens that were read but not given out yet. `.shuffle(buffer_size)` of a data set loses its buffer when it
is resumed; what shuffles here are blocks of rows, which a resume reads again.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import (
    CkptoolError,
    DamagedError,
    MismatchError,
    NotFoundError,
    SourceFile,
    StorageError,
    UsageError,
)
from trainer.sources.documents import data_set_place, reason_of
from trainer.sources.resumable import check_resumable
from trainer.sources.spec import SourceSpec
from trainer.sources.tokenizer import load_tokenizer, tokenizer_digest
from trainer.units import Row


@dataclass(frozen=True)
class Lane:
    """What a lane is made from: `opened()` is a new iterable data set of its rows, `shuffle` the rows of a block."""

    number: int
    num_lanes: int
    opened: Callable[[], Any]
    tokenizer: Any
    field: str
    seq_len: int
    shuffle: int = 0


class LaneReader:
    """A lane being read: windows of `seq_len` + 1 tokens, the last of one being the first of the next."""

    def __init__(self, lane: Lane, state: str = "") -> None:
        """Begin at the lane's start, or where `state`, from `state()`, stood. Raises DamagedError for another text."""
        self._lane = lane
        try:
            stored = json.loads(state) if state else {"data_set": None, "rest": [], "epoch": 0, "num_windows": 0}
            self._rest: list[int] = list(stored["rest"])
            self.epoch, self.num_windows = int(stored["epoch"]), int(stored["num_windows"])
            self._block, self._num_given = int(stored.get("block", 0)), int(stored.get("given", 0))
            begin = stored["data_set"]
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"the state of lane {lane.number} is none: {error!r}") from error
        self._open(begin)

    def next_window(self) -> np.ndarray:
        """int64 of shape (seq_len + 1,). A lane that ends begins again.

        Raises UsageError for one without documents, DamagedError or StorageError for what can't be read.
        """
        size = self._lane.seq_len + 1
        with read_errors(f"lane {self._lane.number} of the stream"):
            while len(self._rest) < size:
                self._rest += next(self._documents)
        window = np.array(self._rest[:size], np.int64)
        del self._rest[: size - 1]
        self.num_windows += 1
        return window

    def state(self) -> str:
        """JSON; reading goes on after the window that was given last."""
        begin = self._data_set.state_dict() if self._has_read else self._begin
        record = {"data_set": begin, "rest": self._rest, "epoch": self.epoch, "num_windows": self.num_windows}
        if self._lane.shuffle:
            record |= {"data_set": self._begin, "block": self._block, "given": self._num_given}
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    def _open(self, begin: dict[str, Any] | None) -> None:
        self._data_set, self._begin, self._has_read = self._lane.opened(), begin, False
        if begin is not None:
            self._data_set.load_state_dict(begin)
        self._documents = self._read()

    def _read(self) -> Iterator[list[int]]:
        num_documents, is_whole = 0, self._begin is None and not self._num_given
        while True:
            for row in self._shuffled() if self._lane.shuffle else self._data_set:
                self._has_read = True
                text = text_of(row, self._lane.field)
                if text:
                    num_documents += 1
                    yield [*self._lane.tokenizer(text, add_special_tokens=False)["input_ids"], self._end_of_text()]
            if is_whole and not num_documents:
                raise UsageError(
                    f"lane {self._lane.number} of {self._lane.num_lanes} has no documents",
                    hint="lanes = a smaller number",
                )
            num_documents, is_whole = 0, True
            self.epoch += 1
            self._data_set, self._begin, self._has_read = self._lane.opened(), None, False
            self._block = self._num_given = 0

    def _shuffled(self) -> Iterator[dict[str, Any]]:
        """The rows block by block, each block in an order of its own. A state says where the block begins, and how many
        of its rows were given."""
        rows = iter(self._data_set)
        while block := list(islice(rows, self._lane.shuffle)):
            # random() gives the same numbers for a seed in all versions of Python; shuffle() doesn't promise it.
            key = f"ckptool-lane-1 lane={self._lane.number} epoch={self.epoch} block={self._block}"
            draw = random.Random(key).random
            order = sorted((draw(), place) for place in range(len(block)))
            for _, place in order[self._num_given :]:
                self._num_given += 1
                yield block[place]
            self._begin = self._data_set.state_dict()
            self._block, self._num_given = self._block + 1, 0

    def _end_of_text(self) -> int:
        return self._lane.tokenizer.eos_token_id


class Lanes:
    """The units of a streaming source: a lane is a unit, and epoch n of it is its window n.

    A rank opens only the lanes that it is asked for, and asks for each lane's windows in their order.
    """

    kind = "window"
    fill = 1.0

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._readers: dict[int, LaneReader] = {}
        self.restored = [""] * len(lanes)
        self.num_units = len(lanes)
        self.seq_len = lanes[0].seq_len

    def row(self, index: int, epoch: int = 0) -> Row:
        """Window `epoch` of lane `index`. Raises MismatchError when that is not the lane's next one."""
        if index not in self._readers:
            self._readers[index] = LaneReader(self._lanes[index], self.restored[index])
        reader = self._readers[index]
        if reader.num_windows != epoch:
            raise MismatchError(
                f"lane {index} stands at window {reader.num_windows}, the data position at {epoch}",
                hint="a stream goes on only where it stood: a position that was moved needs an indexed source",
            )
        window = reader.next_window()
        return Row(window[:-1], window[1:])

    def padded_length(self, longest: int) -> int:
        return self.seq_len

    def states(self) -> dict[int, str]:
        """Where the lanes stand that were read here since they were restored."""
        return {lane: reader.state() for lane, reader in self._readers.items()}

    def restore(self, states: list[str]) -> None:
        """Go on where each lane stood. The world size may be another."""
        if len(states) != len(self._lanes):
            raise MismatchError(f"{len(states)} lanes were saved, the source has {len(self._lanes)}")
        self.restored, self._readers = list(states), {}


@contextlib.contextmanager
def read_errors(where: str) -> Iterator[None]:
    """What `datasets` and the libraries below it raise while a stream is read, which is nearly anything, as one line.

    Raises StorageError for the system's and the network's errors, else DamagedError.
    """
    try:
        yield
    except CkptoolError:
        raise
    except Exception as error:
        kind = StorageError if isinstance(error, OSError) else DamagedError
        raise kind(f"{where} can't be read: {type(error).__name__}: {reason_of(error)}") from error


def text_of(row: dict[str, Any], field: str) -> str | None:
    """Raises DamagedError when the row has no such text."""
    if field not in row:
        raise DamagedError(f"a row of the stream has no field {field!r}, only {', '.join(row)}", hint="field = ...")
    if row[field] is not None and not isinstance(row[field], str):
        raise DamagedError(f"the field {field!r} of a row is no string but {type(row[field]).__name__}")
    return row[field]


def open_lanes(spec: SourceSpec, hf_folder: Path, seq_len: int) -> Lanes:
    """The lanes of a source of kind `stream`. Raises the errors of `open_stream` and `load_tokenizer`."""
    return Lanes(split_into_lanes(open_stream(spec), spec, load_tokenizer(hf_folder), seq_len))


def stream_fingerprint(spec: SourceSpec, hf_folder: Path) -> dict[str, str | int]:
    """What is known of a stream without reading it: its name, how it is split, and its first rows.

    Raises UnsupportedError when it can't be resumed, and the errors of `open_stream` and `read_errors`.
    """
    stream = open_stream(spec)
    [first, *_] = split_into_lanes(stream, spec, tokenizer=None, seq_len=1)
    with read_errors(spec.name):
        first_rows = check_resumable(first.opened, spec.name)
    return {
        "kind": "stream",
        "path": Path(spec.paths[0]).name if Path(spec.paths[0]).exists() else spec.paths[0],
        "config": spec.config,
        "split": spec.split,
        "field": spec.field,
        "lanes": spec.lanes,
        **({"shuffle": spec.shuffle} if spec.shuffle else {}),
        "num_shards": stream.n_shards,
        "first_rows": first_rows,
        "tokenizer": tokenizer_digest(hf_folder),
    }


def open_stream(spec: SourceSpec) -> Any:
    """The iterable data set of a source of kind `stream`. Raises NotFoundError, DamagedError."""
    import datasets

    [name] = spec.paths
    path = Path(name).expanduser()
    try:
        if (path / "state.json").is_file():
            rows = datasets.load_from_disk(str(path))
            return rows.to_iterable_dataset(num_shards=min(spec.lanes, len(rows)) or 1)
        if path.is_file():
            builder = SourceFile(path, path.name).builder
            return datasets.load_dataset(builder, data_files=glob.escape(str(path)), split="train", streaming=True)
        return datasets.load_dataset(data_set_place(name), spec.config or None, split=spec.split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise NotFoundError(f"no data set {name}: {error}") from error
    except (ValueError, OSError, KeyError) as error:
        raise DamagedError(f"can't stream the data set {name}: {error}") from error


def split_into_lanes(data_set: Any, spec: SourceSpec, tokenizer: Any, seq_len: int) -> list[Lane]:
    """The lanes of an iterable data set."""
    from datasets.distributed import split_dataset_by_node

    def opened(number: int) -> Callable[[], Any]:
        # Data sets that are made from one another share what they count in: each reader needs a whole copy.
        return lambda: split_dataset_by_node(copy.deepcopy(data_set), number, spec.lanes)

    return [Lane(n, spec.lanes, opened(n), tokenizer, spec.field, seq_len, spec.shuffle) for n in range(spec.lanes)]
