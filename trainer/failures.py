"""What a failure is to the other ranks, and what the commonest ones mean to a person."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from ckptool import CkptoolError
from trainer.config import TrainConfig
from trainer.stopwatch import Stopwatch

#: How gloo, NCCL and the store say that the other end of a connection is gone.
_LOST_CONTACT = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "lost contact",
    "remote process exited",
    "imed out",
)
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Failure:
    """Why a run ends: the rank where it began, its host, its step and phase. `is_expected`: an error of ours."""

    rank: int
    host: str
    step: int
    phase: str
    cause: str
    exit_code: int = 1
    is_expected: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, stopwatch: Stopwatch) -> Failure:
        is_expected = isinstance(error, CkptoolError)
        cause = str(error) if is_expected else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, CkptoolError) else 1
        return cls(rank, socket.gethostname(), stopwatch.step, stopwatch.phase, cause, code, is_expected)

    def line(self) -> str:
        return f"rank {self.rank} on {self.host} failed in step {self.step + 1} ({self.phase}): {self.cause}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))


def is_lost_contact(error: BaseException) -> bool:
    """True when the error only says that another rank is gone: that one's own error is the cause."""
    return isinstance(error, (RuntimeError, CkptoolError)) and any(text in str(error) for text in _LOST_CONTACT)


@contextlib.contextmanager
def memory_advice(config: TrainConfig, stopwatch: Stopwatch, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into a CkptoolError that says what to change, the cheapest first."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        is_cpu = any(text in str(error) for text in _CPU_OUT_OF_MEMORY)
        if not (is_cpu or isinstance(error, torch.OutOfMemoryError)):
            raise
        where = f"step {stopwatch.step + 1} ({stopwatch.phase})"
        raise CkptoolError(
            f"out of memory in {where}{_memory_in_use(device)}", hint="; or ".join(_ways_out(config, device))
        ) from error


def _ways_out(config: TrainConfig, device: torch.device) -> list[str]:
    """What still can be changed, in the order of docs/howto/train.md."""
    ways = []
    if config.micro_batch_size > 1:
        ways.append(f"--micro-batch-size {config.micro_batch_size // 2} (the same training: more micro-steps a step)")
    if config.activation_checkpointing == "none":
        ways.append("--activation-checkpointing block (a third more compute, most of the activations less)")
    if device.type == "cuda" and "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        ways.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (less of the memory lost to gaps)")
    if device.type == "cuda" and not config.cpu_offload:
        ways.append("--cpu-offload (weights and optimizer in host memory: slow)")
    ways.append("more ranks (each holds its part of weights and optimizer)")
    ways.append(f"a smaller --seq-len than {config.seq_len} (another data order, so a new run)")
    return ways


def _memory_in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    numbers = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)
    used, reserved, free_gb, total_gb = (f"{number / 1e9:.1f} GB" for number in numbers)
    return f": {used} in tensors, {reserved} reserved by torch, {free_gb} of {total_gb} free"
