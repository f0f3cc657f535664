"""What multi.py has the ranks of torchrun do, besides training.

torchrun ... benchmarks/gpu/rank_programs.py load RESULTS DEVICE CHECKPOINT...
torchrun ... benchmarks/gpu/rank_programs.py dies-in-save STEP SECONDS [trainer's options]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def load(results: str, device: str, *checkpoints: str) -> None:
    """Load every tensor of the checkpoints as FSDP2 shards it; a line of RESULTS each: bytes and seconds of the ranks.

    With both readers in turn: `stock`, torch's FileSystemReader, and `ours`. Bytes are what a rank asks of the files.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    import ckptool
    from ckptool.storage.files import RangeReader

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    num_read = 0

    class CountingReader(dcp.FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            nonlocal num_read
            num_read += sum(self.storage_data[item.storage_index].length for item in plan.items)
            return super().read_data(plan, planner)

    read_into = RangeReader.read_into

    def count(self: RangeReader, name: str, offset_bytes: int, out: memoryview) -> None:
        nonlocal num_read
        num_read += len(out)
        read_into(self, name, offset_bytes, out)

    RangeReader.read_into = count  # type: ignore[method-assign]
    for checkpoint in checkpoints:
        entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            fqn: zeros(
                entry.size,
                dtype=entry.properties.dtype,
                device_mesh=mesh,
                placements=[Shard(0) if len(entry.size) else Replicate()],
            )
            for fqn, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        held = sum(tensor.to_local().nbytes for tensor in state.values())
        for reader, opened in (("ours", ckptool.StorageReader), ("stock", CountingReader)):
            num_read = 0
            dist.barrier()
            began = time.perf_counter()
            dcp.load(state, storage_reader=opened(checkpoint))
            if device == "cuda":
                torch.cuda.synchronize()
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (num_read, held, time.perf_counter() - began))
            if dist.get_rank() == 0:
                read, held_bytes, walls = zip(*ranks, strict=True)
                found = {"checkpoint": checkpoint, "reader": reader, "seconds": round(max(walls), 3)}
                found |= {"read_bytes_by_rank": read, "held_bytes_by_rank": held_bytes}
                with open(results, "a") as file:
                    file.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def dies_in_save(step: int, seconds: float) -> None:
    """The trainer, whose last rank gets SIGKILL so many seconds after it began to save step STEP."""
    import ckptool
    from trainer import cli

    save = ckptool.AsyncSaver.save
    is_victim = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def save_and_die(self: ckptool.AsyncSaver, state: Any, target: Any, **rest: Any) -> Any:
        if is_victim and rest["provenance"].step == step:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return save(self, state, target, **rest)

    ckptool.AsyncSaver.save = save_and_die  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    match sys.argv[1]:
        case "load":
            load(*sys.argv[2:])
        case "dies-in-save":
            _, _, at_step, after_seconds, *options = sys.argv
            sys.argv[1:] = options
            dies_in_save(int(at_step), float(after_seconds))
