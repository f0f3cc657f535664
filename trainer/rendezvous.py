"""Joining torchrun's process group, also after a restart.

torchrun keeps one store for all lives of a job, and a process may train more than once; what was left in the store
(addresses of groups, a failure) must not reach those that come later, which would wait for dead ranks for ever. So the
living ranks agree on a name that nobody has used, and keep everything below it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from ckptool import CkptoolError

_POLL_SECONDS = 0.05
JOIN_SECONDS = 1800.0


def join(backend: str, timeout: timedelta) -> None:
    """Make the default process group: torchrun's, or one of a single rank when nothing says otherwise.

    `timeout` is that of its collectives. Raises CkptoolError when ranks don't come within JOIN_SECONDS.
    """
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(agree_on_name(store, rank, world_size), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def is_restart() -> bool:
    """True when torchrun has started the ranks of this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def remember(what: str, value: str) -> None:
    """Leave something for later lives of this job, which `recall` finds as long as torchrun's store is there."""
    _store_of_job().set(_key(what), value)


def recall(what: str) -> str:
    """What an earlier life of this job has left last, or ""."""
    store, key = _store_of_job(), _key(what)
    return store.get(key).decode() if store.check([key]) else ""


def _key(what: str) -> str:
    return f"trainer/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{what}"


def _store_of_job() -> dist.Store:
    """The store of the default process group without the prefixes that each life has of its own."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def agree_on_name(store: dist.Store, rank: int, world_size: int, limit_seconds: float = JOIN_SECONDS) -> str:
    """A name that these ranks share and no earlier ones did, whatever those have left in the store.

    Each rank greets with a number of its own and rank 0 answers to that number, so an answer to a dead rank is read by
    nobody; rank 0 goes on until the living ones have thanked it.
    """
    name, greeting = uuid.uuid4().hex, uuid.uuid4().hex
    deadline = time.monotonic() + limit_seconds
    if rank != 0:
        store.set(f"greeting/{rank}", greeting)
        _wait_for(store, f"answer/{greeting}", deadline, "rank 0")
        name = store.get(f"answer/{greeting}").decode()
        store.set(f"thanks/{name}/{rank}", "")
        return name
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"greeting/{other}"]):
                store.set(f"answer/{store.get(f'greeting/{other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"thanks/{name}/{other}"])}
        _check_deadline(deadline, f"ranks {', '.join(map(str, sorted(missing)[:5]))}")
        time.sleep(_POLL_SECONDS)
    return name


def _wait_for(store: dist.Store, key: str, deadline: float, whom: str) -> None:
    while not store.check([key]):
        _check_deadline(deadline, whom)
        time.sleep(_POLL_SECONDS)


def _check_deadline(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise CkptoolError(f"{whom} did not join the run in time", hint="are all nodes started, with the same command?")
