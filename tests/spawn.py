"""Run a function on several gloo ranks of this machine, and get its results or its first error back."""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# A fork server imports slow libraries once; each rank is then a cheap fork of it (a plain spawn costs seconds of CPU
# per rank). But transformers imports torchao where it is installed, which asks a GPU what it can do, and a process that
# has asked can't be forked.
_CAN_FORK = os.environ.get("TEST_DEVICE") != "cuda" or importlib.util.find_spec("torchao") is None
SERVER = multiprocessing.get_context("forkserver" if _CAN_FORK else "spawn")
SERVER.set_forkserver_preload(
    [
        *("torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp"),
        *("transformers.models.llama.modeling_llama", "trainer.train"),
    ]
)


def skip_without_gpus(num_ranks: int) -> None:
    """Skip a test of more ranks than there are GPUs, where TEST_DEVICE=cuda wants one for each."""
    if os.environ.get("TEST_DEVICE") == "cuda" and num_ranks > torch.cuda.device_count():
        pytest.skip(f"{num_ranks} ranks need {num_ranks} GPUs, and there are {torch.cuda.device_count()}")


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, limit_seconds: float = 120.0) -> list[Any]:
    """Call `function(rank, *args)` on every rank, with gloo as default process group; return the results in rank order.

    `function` and `args` are pickled, so `function` must be defined at module level. Raises RuntimeError with the
    traceback of the first rank that failed, and TimeoutError when the ranks are not done after `limit_seconds`. A rank
    that ended itself with exit code 0 (a test's stand-in for a lost machine) gives None.
    """
    skip_without_gpus(world_size)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks = [
            SERVER.Process(target=_run_rank, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait_for(ranks, function.__name__, limit_seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        failures = sorted(folder.glob("failure-*"))
        if failures:
            raise RuntimeError(failures[0].read_text())
        codes = [process.exitcode for process in ranks]
        if any(codes):
            raise RuntimeError(f"{function.__name__}: ranks exited with {codes}")
        results = [folder / f"result-{rank}" for rank in range(world_size)]
        return [pickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def _wait_for(ranks: list[Any], title: str, limit_seconds: float) -> None:
    """Return when all ranks are done, or when one has failed."""
    deadline = time.monotonic() + limit_seconds
    while running := [process.sentinel for process in ranks if process.is_alive()]:
        multiprocessing.connection.wait(running, timeout=1.0)
        if any(process.exitcode for process in ranks):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{title} on {len(ranks)} ranks was not done in {limit_seconds} s")


def _run_rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    backend = "gloo"
    if os.environ.get("TEST_DEVICE") == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        (folder / f"result-{rank}").write_bytes(pickle.dumps(function(rank, *args)))
    except BaseException:
        # BaseException, because torch's CheckpointException is no Exception and would end the process without a word.
        (folder / f"failure-{time.monotonic_ns():020}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    dist.destroy_process_group()
