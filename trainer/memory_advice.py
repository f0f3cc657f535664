"""Running out of memory as one line that says what to change, with the numbers that `ckptool estimate` has for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool import CkptoolError
from trainer.config import TrainConfig
from trainer.stopwatch import Stopwatch

_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class MemoryAdvice:
    """What is known of a run when its memory is gone. `hf_folder` holds the model's config."""

    config: TrainConfig
    hf_folder: Path
    world_size: int
    device: torch.device

    @contextlib.contextmanager
    def when_out_of_memory(self, stopwatch: Stopwatch) -> Iterator[None]:
        """Turn running out of memory into a CkptoolError that says what to change, the cheapest first."""
        try:
            yield
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            is_cpu = any(text in str(error) for text in _CPU_OUT_OF_MEMORY)
            if not (is_cpu or isinstance(error, torch.OutOfMemoryError)):
                raise
            where = f"step {stopwatch.step + 1} ({stopwatch.phase})"
            need = self._estimated(self.config, " (estimated need: {})")
            raise CkptoolError(
                f"out of memory in {where}{self._memory_in_use()}{need}",
                hint="; or ".join(self._ways_out()),
            ) from error

    def _ways_out(self) -> list[str]:
        """What still can be changed, in the order of docs/howto/train-memory.md; each with its need if made alone."""
        config, ways = self.config, []
        half = replace(config, micro_batch_size=config.micro_batch_size // 2)
        if half.micro_batch_size and self._is_less(half):
            need = self._estimated(half, ": {}")
            ways.append(f"--micro-batch-size {half.micro_batch_size} (the same training, more micro-steps{need})")
        if not config.reshard_after_forward:
            need = self._estimated(replace(config, reshard_after_forward=True), ": {}")
            ways.append(f"--reshard-after-forward (weights of a block at a time{need})")
        if config.activation_checkpointing == "none":
            need = self._estimated(replace(config, activation_checkpointing="block"), ": {}")
            ways.append(f"--activation-checkpointing block (a third more compute, fewer activations{need})")
        is_cuda = self.device.type == "cuda"
        if is_cuda and "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            ways.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (less of the memory lost to gaps)")
        if config.optimizer == "adamw" and not config.lora_rank:
            need = self._estimated(replace(config, optimizer="adamw8bit"), ": {}")
            ways.append(f"--optimizer adamw8bit (moments in 8 bits; for a run from its beginning{need})")
        if is_cuda and not config.cpu_offload:
            ways.append("--cpu-offload (weights and optimizer in host memory: slow)")
        fewest = self._fewest_ranks()
        enough = f"; {fewest} would do by the estimate" if fewest else ""
        ways.append(f"more ranks (each holds its part of weights and optimizer{enough})")
        half = replace(config, seq_len=max(1, config.seq_len // 2))
        need = self._estimated(half, f": {{}} with {half.seq_len}")
        ways.append(f"a smaller --seq-len than {config.seq_len} (another data order, so a new run{need})")
        return ways

    def _estimated(self, config: TrainConfig, text: str) -> str:
        """`text` with the gigabytes that a rank needs filled in; nothing where there is no estimate."""
        need = self._needed_bytes(config)
        if need is None:
            return ""
        return text.format(f"{need / 1e9:.2g} GB" if need < 1e10 else f"{need / 1e9:.0f} GB")

    def _is_less(self, config: TrainConfig) -> bool:
        """False when `config` needs no less than now: the second micro-step keeps all gradients in fp32."""
        now, then = self._needed_bytes(self.config), self._needed_bytes(config)
        return now is None or then is None or then < now

    def _needed_bytes(self, config: TrainConfig) -> int | None:
        way = self._estimate(config)
        if way is None:
            return None
        return way["needed_bytes"] if self.device.type == "cuda" else way["peak_bytes"]

    def _fewest_ranks(self) -> int | None:
        """The smallest number of GPUs of this size that the run fits into as it is, when it is more than now."""
        way = self._estimate(self.config) if self.device.type == "cuda" else None
        fewest = way["fewest_gpus"] if way else None
        return fewest if fewest and fewest > self.world_size else None

    def _estimate(self, config: TrainConfig) -> dict[str, Any] | None:
        """What `ckptool estimate` says of such a run; None for what it knows nothing of."""
        if config.lora_rank or config.cpu_offload or config.param_dtype == "keep":
            return None
        is_cuda = self.device.type == "cuda"
        compute_dtype = {"auto": "bf16" if is_cuda else "fp32"}.get(config.compute_dtype, config.compute_dtype)
        gpu: dict[str, Any] = {"gpu_bytes": torch.cuda.mem_get_info(self.device)[1]} if is_cuda else {}
        try:
            result = ckptool.estimate(
                str(self.hf_folder),
                num_gpus=self.world_size,
                seq_len=config.seq_len,
                micro_batch_size=config.micro_batch_size,
                global_batch_size=config.global_batch_size,
                dp_replicate=config.dp_replicate,
                tp=config.tp,
                param_dtype=config.param_dtype,
                optimizer=config.optimizer,
                optimizer_dtype="fp32" if config.stochastic_rounding and config.optimizer == "adamw" else None,
                compute_dtype=compute_dtype,
                loss=config.loss,
                compiled=config.compile,
                reshard_after_forward=config.reshard_after_forward,
                **gpu,
            )
        except CkptoolError:
            return None
        checkpointing = config.activation_checkpointing
        return next(
            way
            for way in result.details["ways"]
            if way["sharding"] == "fsdp2" and way["checkpointing"] == checkpointing
        )

    def _memory_in_use(self) -> str:
        if self.device.type != "cuda":
            return ""
        free, total = torch.cuda.mem_get_info(self.device)
        numbers = (torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device), free, total)
        used, reserved, free_gb, total_gb = (f"{number / 1e9:.1f} GB" for number in numbers)
        return f": {used} in tensors, {reserved} reserved by torch, {free_gb} of {total_gb} free"
