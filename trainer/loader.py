"""A loader of the user's own, whose position only it knows: resumed on the ranks it was saved on, and on no others."""

from __future__ import annotations

import base64
import importlib
import io
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from ckptool import CkptoolError, DamagedError, DataPosition, DataSource, MismatchError, UnsupportedError, UsageError
from trainer.parallel import Ranks
from trainer.sources.spec import SourceSpec
from trainer.units import IGNORED, MicroBatch


class LoaderData:
    """What `TrainingData` is for sources of known order, for `loader:MODULE:FUNCTION`.

    `FUNCTION(rank, world_size)` gives an iterable with `state_dict` and `load_state_dict`, as torchdata's Stateful asks
    for. Its items are dicts with `input_ids` and, if not all of them are trained, `labels`: the same ids, IGNORED where
    nothing is trained; both int64 of shape (micro batch, tokens). They may have `position_ids`, which begin at 0
    with each document of a packed row. A loader that ends is iterated anew.
    """

    def __init__(self, spec: SourceSpec, rank: int, world_size: int, seq_len: int) -> None:
        """Raises UsageError when there is no such function, UnsupportedError when what it gives has no state."""
        self.name = spec.name
        self._path = spec.paths[0]
        self._rank, self._world_size, self._seq_len = rank, world_size, seq_len
        self._loader = _make(self._path, rank, world_size)
        self._items: Iterator[Any] | None = None

    def start(self, seed: int, global_batch_size: int) -> DataPosition:
        """The beginning. The loader's units have no numbers of their own, so it counts as one that comes again."""
        source = DataSource(self.name, 1, {"kind": "loader", "path": self._path})
        return DataPosition.begin([source], seq_len=self._seq_len, seed=seed, global_batch_size=global_batch_size)

    def micro_batches(
        self, position: DataPosition, rank: int, world_size: int, micro_batch_size: int
    ) -> Iterator[MicroBatch]:
        """This rank's items for the next step: as many as the global batch asks for.

        Raises UsageError when the ranks can't share it evenly, or an item has another number of rows.
        """
        step = position.next_units()
        num_items, rest = divmod(len(step), world_size * micro_batch_size)
        if rest:
            raise UsageError(
                f"{self.name}: {world_size} ranks with items of {micro_batch_size} rows can't share {len(step)} units",
                hint="a --global-batch-size that is a multiple of ranks times --micro-batch-size",
            )
        first = step.start + rank * num_items * micro_batch_size
        for number in range(num_items):
            batch = self._parse(self._next_item())
            if len(batch.inputs) != micro_batch_size:
                raise UsageError(
                    f"{self.name}: an item has {len(batch.inputs)} rows, not {micro_batch_size}",
                    hint="the loader's batch size must be --micro-batch-size, without a smaller last batch",
                )
            begin = first + number * micro_batch_size
            units = tuple(range(begin, begin + micro_batch_size))
            yield MicroBatch(units, batch.inputs, batch.labels, batch.position_ids)

    def lane_states(self, ranks: Ranks) -> dict[str, dict[str, str]]:
        """The loader's state on each rank. Raises UnsupportedError for one that could not be read again."""
        return {self.name: {f"{rank:05}": state for rank, state in enumerate(ranks.gather_data(self._state()))}}

    def restore_lanes(self, states: dict[str, dict[str, str]]) -> None:
        """Raises MismatchError when the states are those of another number of ranks."""
        saved = states.get(self.name, {})
        if len(saved) != self._world_size:
            raise MismatchError(
                f"{self.name}: this loader was saved on {len(saved)} ranks and there are {self._world_size}; it would "
                f"give its data to other ranks, so that some units are trained again and others are skipped",
                hint=f"start {len(saved)} ranks; sources of the other kinds resume on any number",
            )
        self._loader.load_state_dict(_decode(saved[f"{self._rank:05}"], self.name))
        self._items = None

    def _next_item(self) -> Any:
        for _ in range(2):
            if self._items is None:
                self._items = iter(self._loader)
            for item in self._items:
                return item
            self._items = None
        raise UsageError(f"{self.name}: the loader gives nothing on rank {self._rank}")

    def _parse(self, item: Any) -> MicroBatch:
        tensors = {} if not isinstance(item, dict) else {"labels": item.get("input_ids"), **item}
        ids, labels, positions = (tensors.get(name) for name in ("input_ids", "labels", "position_ids"))
        if not _are_ids(ids) or not _are_ids(labels) or not (positions is None or _are_ids(positions)):
            raise UnsupportedError(f"{self.name}: an item should be a dict with int64 input_ids of two dims")
        if labels.shape != ids.shape or not torch.equal(labels[labels != IGNORED], ids[labels != IGNORED]):
            raise UnsupportedError(
                f"{self.name}: labels should be the input_ids, {IGNORED} where nothing is trained, and not shifted"
            )
        return MicroBatch((), ids[:, :-1], labels[:, 1:], None if positions is None else positions[:, :-1])

    def _state(self) -> str:
        stream = io.BytesIO()
        torch.save(self._loader.state_dict(), stream)
        text = base64.b64encode(stream.getvalue()).decode("ascii")
        try:
            _decode(text, self.name)
        except DamagedError as error:
            raise UnsupportedError(f"{self.name}: the loader's state holds more than plain data: {error}") from error
        return text


def _are_ids(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim == 2


def _decode(text: str, name: str) -> Any:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)
    except Exception as error:  # torch.load raises nearly anything
        raise DamagedError(f"{name}: not the state of a loader: {str(error).splitlines()[0]}") from error


def _make(path: str, rank: int, world_size: int) -> Any:
    module_name, _, function_name = path.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no loader {path}: {error}", hint="--data loader:MODULE:FUNCTION") from error
    finally:
        sys.path.remove("")
    try:
        loader = function(rank, world_size)
    except CkptoolError:
        raise
    except Exception as error:
        raise UsageError(f"{path}({rank}, {world_size}) failed: {type(error).__name__}: {error}") from error
    missing = [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(loader, name)]
    if missing:
        raise UnsupportedError(f"what {path} gives has no {missing[0]}, so it can't be resumed")
    return loader
