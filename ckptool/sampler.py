"""GlobalBatchSampler: the order of units for other people's training loops, as a batch sampler of torch's DataLoader.

The sampler lives in the main process and runs ahead of training as far as the loader's workers prefetch. What was
trained is another thing: only `step` counts that, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ckptool.core.data_source import DataSource
from ckptool.core.history import UNKNOWN
from ckptool.core.position import DataPosition, rank_units, step_units
from ckptool.errors import DamagedError, UsageError

#: One sample of a data set: its index, or (source name, index) when there are several sources.
Sample = int | tuple[str, int]


class GlobalBatchSampler(Sampler[list[Sample]]):
    """The micro-batches of one rank, as lists of indices into the data set: `DataLoader(..., batch_sampler=sampler)`.

    Each step takes the next `global_batch_size` samples of the order, shared by the ranks; any number of ranks up to
    that. Every rank gets `num_micro_batches` lists a step. A rank whose share is used up gets a list with one sample
    that must count nothing: `num_real` tells.

    Call `step` after each `optimizer.step()`. `state_dict` holds what was trained, not what was fetched, and is the
    same on every rank and for every number of ranks: save it in the checkpoint, best under the key `data`, where
    `ckptool data` finds it.
    """

    def __init__(
        self,
        sources: int | DataSource | Sequence[DataSource],
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        num_steps: int | None = None,
        seq_len: int = 1,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`sources` is the length of the data set, or DataSources, whose fingerprints a loaded state must have.

        `micro_batch_size` (default: a rank's whole share) is in samples; `rank` and `world_size` are by default those
        of the process group; iteration ends after `num_steps` steps in all, those before a resume included, or never.
        `seq_len` (tokens a sample) is only for `ckptool data show`; `weights` mix several sources.

        Raises UsageError for more ranks than samples in a batch, or numbers that can't be.
        """
        if isinstance(sources, int):
            sources = [DataSource("data", sources, unit_kind="document")]
        elif isinstance(sources, DataSource):
            sources = [sources]
        has_group = dist.is_available() and dist.is_initialized()
        self._world_size = (dist.get_world_size() if has_group else 1) if world_size is None else world_size
        self._rank = (dist.get_rank() if has_group else 0) if rank is None else rank
        if not 0 <= self._rank < self._world_size <= global_batch_size:
            raise UsageError(
                f"rank {self._rank} of {self._world_size} can't share a global batch of {global_batch_size}",
                hint="any world size up to the global batch works",
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UsageError(f"a micro-batch of {micro_batch_size} samples")
        self._longest = -(-global_batch_size // self._world_size)
        self._micro_batch_size = micro_batch_size or self._longest
        self._num_steps = num_steps
        self._start = DataPosition.begin(
            sources, seq_len=seq_len, seed=seed, global_batch_size=global_batch_size, weights=weights
        )
        self._used_up_from: int | None = None
        #: What was trained. The history of single units is not known here: the loop's feeding isn't seen.
        self.position = replace(self._start, history=UNKNOWN)

    @property
    def num_micro_batches(self) -> int:
        """Lists of samples that every rank gets in a step."""
        return -(-self._longest // self._micro_batch_size)

    def num_real(self, micro_batch: int) -> int:
        """How many samples of this rank's `micro_batch`-th list of a step count; 0: weigh its loss with 0."""
        mine = len(rank_units(range(self.position.global_batch_size), self._rank, self._world_size))
        return max(0, min(self._micro_batch_size, mine - micro_batch * self._micro_batch_size))

    def step(self) -> None:
        """Say that the optimizer has stepped: the step's samples are trained now."""
        self.position = self.position.advance()

    def __iter__(self) -> Iterator[list[Sample]]:
        """From the first step on that is not trained. Raises UsageError when a whole pass before was never counted."""
        if self._used_up_from == self.position.num_steps:
            raise UsageError(
                "all samples would be trained again: step() was not called in a whole pass over them",
                hint="call sampler.step() after each optimizer.step()",
            )
        return _MicroBatches(self)

    def __len__(self) -> int:
        """Lists that are left. Raises TypeError, as len() does, when there is no end."""
        if self._num_steps is None:
            raise TypeError("this sampler has no end; give it num_steps")
        return max(0, self._num_steps - self.position.num_steps) * self.num_micro_batches

    def state_dict(self) -> dict[str, Any]:
        """`cursor` (int64 of shape (8,)) and `record` (JSON), as `docs/spec/data-position.md` has them."""
        return {"cursor": torch.tensor(self.position.cursor()), "record": self.position.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state of any world size stands.

        Raises MismatchError for other data, another seed or other weights, DamagedError when the state is no state.
        """
        record = DataPosition.from_json(str(state.get("record")), "the sampler's state")
        if "cursor" in state and record.cursor() != torch.as_tensor(state["cursor"]).tolist():
            raise DamagedError("the sampler's state: cursor and record disagree")
        self.position = self._start.at(record)
        self._used_up_from = None

    def samples_of(self, position: DataPosition, micro_batch: int) -> list[Sample]:
        """This rank's `micro_batch`-th list of the step that begins at `position`."""
        step = step_units(position.consumed, position.global_batch_size)
        start = micro_batch * self._micro_batch_size
        mine = rank_units(step, self._rank, self._world_size)[start : start + self._micro_batch_size]
        units = position.units(mine or step[:1])
        return [unit.index if len(position.segment.sources) == 1 else (unit.source, unit.index) for unit in units]

    def is_over(self, position: DataPosition, began: DataPosition) -> bool:
        """True when no step follows `position` in a pass that began at `began`; such a pass is used up then."""
        is_over = self._num_steps is not None and position.num_steps >= self._num_steps
        if is_over and position != began:
            self._used_up_from = began.num_steps
        return is_over


class _MicroBatches:
    """An iterator that knows its place, for torchdata's StatefulDataLoader: its state is that of what it has given out.

    That loader takes the state when it asks for indices, so the sampler's own state is then behind what the training
    loop has by as much as was prefetched; the iterator's isn't.
    """

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler
        self._position = self._began = sampler.position
        self._micro_batch = 0

    def __iter__(self) -> _MicroBatches:
        return self

    def __next__(self) -> list[Sample]:
        if self._sampler.is_over(self._position, self._began):
            raise StopIteration
        samples = self._sampler.samples_of(self._position, self._micro_batch)
        self._micro_batch += 1
        if self._micro_batch == self._sampler.num_micro_batches:
            self._position, self._micro_batch = self._position.advance(), 0
        return samples

    def state_dict(self) -> dict[str, Any]:
        """A step that was given out in part is to be given out anew: its gradients are not in a checkpoint."""
        return {"record": self._position.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._position = self._began = self._sampler.position
        self._micro_batch = 0
