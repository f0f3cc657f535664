"""What a run writes about itself: lines for a person, curves, `{metrics,samples,startup}.jsonl`, all by rank 0."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.curves import Curves
from trainer.os_errors import named_os_errors


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`. `attempt` is the start time of the process that trained the step.

    `skipped` is true when loss or gradients were not finite and the weights were left as they were. The seconds of
    the phases are rank 0's. `mfu` is None where the GPU's speed is not known. `rank_data_seconds` and
    `rank_probe_seconds` are what each rank did without waiting for the others (see stragglers.py), in the steps in
    which that was measured.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    consumed: int
    max_memory_bytes: int
    checkpoint_seconds: float
    checkpoint_stall_seconds: float
    world_size: int
    attempt: str
    skipped: bool = False
    eval_loss: float | None = None
    data_seconds: float = 0.0
    forward_backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    mfu: float | None = None
    rank_data_seconds: list[float] | None = None
    rank_probe_seconds: list[float] | None = None

    def progress_line(self, steps: int) -> str:
        saved = f"  saved in {self.checkpoint_seconds:.1f} s" if self.checkpoint_seconds else ""
        saved += f"  held-out loss {self.eval_loss:.4f}" if self.eval_loss is not None else ""
        saved += "  SKIPPED: not finite" if self.skipped else ""
        return (
            f"step {self.step}/{steps}  loss {self.loss:.4f}  lr {self.lr:.2e}  grad norm {self.grad_norm:.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self.step_seconds:.2f} s{saved}"
        )


class Log:
    """Appends to the files of a run root. On ranks other than 0 every method does nothing."""

    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._writes = rank == 0
        self._curves: Curves | None = None

    @contextlib.contextmanager
    def drawing(self, boards: tuple[str, ...], step: int) -> Iterator[None]:
        """What happens inside is drawn on these boards as well, by a run that has finished `step` steps."""
        with Curves(boards if self._writes else (), self._root, step, self.say) as self._curves:
            yield
        self._curves = None

    def say(self, line: str) -> None:
        if self._writes:
            print(line, file=sys.stderr, flush=True)

    def metrics(self, metrics: StepMetrics) -> None:
        # JSON has no NaN and no infinity.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(metrics).items()}
        self._append("metrics.jsonl", finite)
        if self._curves is not None:
            self._curves.add(metrics.step, finite)

    def startup(self, record: dict[str, Any]) -> None:
        self._append("startup.jsonl", record)

    def samples(self, attempt: str, step: int, units: list[int]) -> None:
        self._append("samples.jsonl", {"attempt": attempt, "step": step, "units": units})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if not self._writes:
            return
        path = self._root / name
        with named_os_errors(path):
            self._root.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                # Half a line of a run that was killed, or of a full disk, must not swallow this one.
                begin = b"" if not file.tell() or _last_byte(file) == b"\n" else b"\n"
                file.write(begin + json.dumps(record).encode() + b"\n")


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def max_memory_bytes(device: torch.device) -> int:
    """The most memory this process has used: of the device, or on CPU its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
