"""The ranks of a run: their process group and mesh, and what they agree on."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptool import CkptoolError, UsageError
from trainer import rendezvous
from trainer.os_errors import as_storage_error

T = TypeVar("T")

#: Mesh axes, outermost first: copies of the shards, shards of parameters, split layers.
REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS = "dp_replicate", "dp", "tp"

#: How long a collective may wait before torch itself gives up.
COLLECTIVE_TIMEOUT = timedelta(hours=1)

#: How long ranks wait for rank 0 to tokenize. A rank that dies is noticed by torchrun, not by this.
CONTROL_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. `control` is a gloo group for small Python objects."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    tp_size: int = 1

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank trains; the ranks of a tensor-parallel group train the same."""
        return self.rank // self.tp_size

    @property
    def num_data_ranks(self) -> int:
        return self.world_size // self.tp_size

    @property
    def data_mesh(self) -> DeviceMesh:
        """The axes over which FSDP2 shards and copies."""
        names = [name for name in self.mesh.mesh_dim_names or () if name != TENSOR_AXIS]
        return self.mesh[tuple(names)] if len(names) > 1 else self.mesh[names[0]]

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))

    def from_rank0(self, find: Callable[[], T]) -> T:
        """Call `find` on rank 0 and give its result to every rank; its error is a CkptoolError, raised on every rank.

        Of an error that nobody has foreseen rank 0 prints the traceback.
        """
        outcome: list = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = find()
            except CkptoolError as error:
                outcome[1] = error
            except OSError as error:
                outcome[1] = as_storage_error(error)
            except Exception as error:
                traceback.print_exc()
                outcome[1] = CkptoolError(f"rank 0 failed: {type(error).__name__}: {error}")
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_on_rank0(self, value: T) -> list[T] | None:
        """The same on rank 0 alone; None on the others, which wait for nobody."""
        values: list | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.control, group_dst=0)
        return values

    def gather_data(self, value: T) -> list[T]:
        """One value from each part of the data, in order."""
        return self.gather(value)[:: self.tp_size]

    def total(self, count: int) -> torch.Tensor:
        """The sum of a number over the parts of the data, on the device: nothing waits for it here."""
        total = torch.full((), count, device=self.device)
        dist.all_reduce(total)
        return total // self.tp_size

    def sum(self, *values: torch.Tensor | float, known: Sequence[torch.Tensor] = ()) -> list[float]:
        """The sum of each number over the parts of the data, in float64 and in one round.

        The ranks of a tensor-parallel group count as one: their mean. After the sums come the numbers `known` to every
        rank as they are: what is on a GPU is waited for once.
        """
        parts = [
            v.detach().to(self.device, torch.float64)
            if isinstance(v, torch.Tensor)
            else torch.full((), float(v), dtype=torch.float64, device=self.device)
            for v in values
        ]
        total = torch.stack(parts)
        dist.all_reduce(total)
        return torch.cat([total / self.tp_size, *(v.to(total).view(1) for v in known)]).tolist()


@contextlib.contextmanager
def joined_ranks(device_option: str, dp_replicate: int = 1, tp_size: int = 1) -> Iterator[Ranks]:
    """Join torchrun's process group, or one of a single rank when not under torchrun, and leave it at the end.

    Ranks that are next to each other share layers (`tp_size`), then parameters, then nothing (`dp_replicate` copies).
    Raises UsageError when the world size can't be cut so.
    """
    device = _choose_device(device_option)
    is_ours = not dist.is_initialized()
    if is_ours:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rendezvous.join(backend, COLLECTIVE_TIMEOUT)
    world_size = dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    mesh = _make_mesh(device, world_size, dp_replicate, tp_size)
    is_done = False
    try:
        yield Ranks(dist.get_rank(), world_size, device, mesh, control, tp_size)
        is_done = True
    finally:
        # Leaving NCCL waits for peers, which after an error may never answer; the process is about to end anyway.
        if is_ours and (is_done or device.type == "cpu"):
            dist.destroy_process_group()


def _make_mesh(device: torch.device, world_size: int, dp_replicate: int, tp_size: int) -> DeviceMesh:
    if world_size % (dp_replicate * tp_size):
        raise UsageError(
            f"{world_size} ranks can't be cut into --dp-replicate {dp_replicate} times --tp {tp_size} parts",
            hint="their product must divide the number of ranks",
        )
    sizes = {REPLICATE_AXIS: dp_replicate, SHARD_AXIS: world_size // (dp_replicate * tp_size), TENSOR_AXIS: tp_size}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == SHARD_AXIS}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _choose_device(option: str) -> torch.device:
    if option == "cpu" or (option == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no CUDA device", hint="--device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def make_deterministic() -> None:
    """Only kernels that give the same bits each time; torch raises an error for an operation that has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
