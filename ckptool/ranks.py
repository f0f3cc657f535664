"""Steps that all ranks take together and agree on: one rank's error becomes every rank's error, at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckptool import errors
from ckptool.errors import CkptoolError, DistributedError
from ckptool.storage.files import explain_os_error

Value = TypeVar("Value")


@dataclass(frozen=True)
class Failure:
    """What one rank tells the others of its error: plain strings, which always survive the journey."""

    rank: int
    kind: str
    message: str
    hint: str = ""


class Ranks:
    """The ranks of a process group; a single process when torch.distributed is not initialised."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.world_size = dist.get_world_size(group) if self.is_distributed else 1

    def gather(self, value: Value, action: str) -> list[Value]:
        """Every rank's value, in rank order, on every rank. Raises DistributedError when a rank is gone."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.lost_contact(action):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: Value, action: str) -> list[Value]:
        """Every rank's value, in rank order, on the first rank; nothing on the others. Raises as `gather` does."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with self.lost_contact(action):
            dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def from_first(self, values: Sequence[Value], action: str) -> Value:
        """This rank's one of the values that the first rank gives, one for each rank. Raises as `gather` does."""
        if not self.is_distributed:
            return values[0]
        mine: list[Any] = [None]
        with self.lost_contact(action):
            given = list(values) if self.rank == 0 else None
            dist.scatter_object_list(mine, given, group=self.group, group_src=0)
        return mine[0]

    def agree(self, action: str, step: Callable[[], Value]) -> Value:
        """Take `step` on every rank and return its own result; when any failed, raise the first one's error on all."""
        value, failure = self._attempt(step)
        failures = [f for f in self.gather(failure, action) if f is not None]
        if failures:
            _raise(failures[0], action, name_rank=len(failures) < self.world_size)
        return value  # type: ignore[return-value]

    def on_first(self, action: str, step: Callable[[], Value]) -> Value:
        """Take `step` on rank 0 alone; its result, or its error, is every rank's."""
        value, failure = self._attempt(step) if self.rank == 0 else (None, None)
        value, failure = self.gather((value, failure), action)[0]
        if failure is not None:
            _raise(failure, action, name_rank=False)
        return value  # type: ignore[return-value]

    @contextlib.contextmanager
    def lost_contact(self, action: str) -> Iterator[None]:
        """Turn the transport's complaints about a rank that is gone into a DistributedError."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).strip().partition("\n")[0]
            raise DistributedError(f"{action}: rank {self.rank} lost contact with another rank ({cause})") from error

    @contextlib.contextmanager
    def dcp_step(self, action: str) -> Iterator[None]:
        """Around a call of torch's DCP, which has its own way to share errors: name the origin rank and the cause.

        An error of ours keeps its class; any other becomes a DistributedError.
        """
        try:
            with self.lost_contact(action):
                yield
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            hint = cause.hint if isinstance(cause, CkptoolError) else ""
            _raise(Failure(rank, type(cause).__name__, str(cause), hint), action, name_rank=True)

    def _attempt(self, step: Callable[[], Value]) -> tuple[Value | None, Failure | None]:
        try:
            return step(), None
        except OSError as error:
            explained = explain_os_error(error, error.filename or "")
            return None, Failure(self.rank, type(explained).__name__, str(explained), explained.hint)
        except Exception as error:
            return None, Failure(self.rank, type(error).__name__, str(error), getattr(error, "hint", ""))


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started, joined into a group of CPUs for the length of the block."""
    dist.init_process_group("gloo")
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


def _raise(failure: Failure, action: str, name_rank: bool) -> NoReturn:
    """Raise what happened on another rank: our own errors as what they are, any other as a DistributedError."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, CkptoolError):
        error = kind(f"rank {failure.rank}: {failure.message}" if name_rank else failure.message, failure.hint)
    else:
        what = f"{action} failed on rank {failure.rank}: {failure.kind}: {failure.message}"
        error = DistributedError(what, failure.hint)
    error.is_shared = True
    raise error
