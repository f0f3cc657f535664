"""Ranks that run the trainer's command line as torchrun would start them, each a process of ours that can be killed.

They are forked from a server that has the libraries imported, so that they are there at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.spawn import SERVER, skip_without_gpus
from tests.trainer import mortal
from trainer import cli


class RankProcess:
    """One rank. `said` is what it wrote to stderr."""

    def __init__(self, environment: dict[str, str], arguments: list[str], fault: tuple | None, said: Path) -> None:
        self._process = SERVER.Process(target=_run, args=(environment, arguments, fault, said))
        self._said = said
        self._process.start()

    def wait(self, limit_seconds: float = 100) -> int:
        """The exit code; minus the number of a signal that ended it."""
        self._process.join(limit_seconds)
        assert self._process.exitcode is not None, f"not done in {limit_seconds} s; it said:\n{self.said}"
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(
    num_ranks: int,
    root: Path,
    arguments: list[str],
    fault: tuple[str, int, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[RankProcess]:
    """Start `python -m trainer ARGUMENTS` on so many ranks; `fault` is what `mortal.arm` takes."""
    skip_without_gpus(num_ranks)
    common = {
        **(environment or {}),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    life = sum(1 for _ in root.glob("said-*-0.txt"))
    return [
        RankProcess(
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, arguments, fault, root / f"said-{life}-{rank}.txt"
        )
        for rank in range(num_ranks)
    ]


def wait_for_step(metrics: Path, step: int, is_alive: Callable[[], bool]) -> None:
    """Return when metrics.jsonl has so many lines; an error when the run has ended or nothing happens."""
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert is_alive(), "it ended by itself"
        assert time.monotonic() < deadline, "the run never came this far"
        time.sleep(0.01)


def kill_after_step(ranks: list[RankProcess], metrics: Path, step: int) -> None:
    """SIGKILL to all, once so many steps are in metrics.jsonl."""
    wait_for_step(metrics, step, lambda: all(rank.is_alive for rank in ranks))
    for rank in ranks:
        rank.kill()


def _run(environment: dict[str, str], arguments: list[str], fault: tuple | None, said: Path) -> None:
    os.environ.update(environment)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    torch.set_num_threads(1)
    if fault:
        mortal.arm(*fault)
    sys.argv = ["trainer", *arguments]
    cli.main()
