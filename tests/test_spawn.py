"""The spawning helper: a rank's failure must reach the test, or tests of ranks prove nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks


def sum_of_ranks(rank: int, scale: int) -> int:
    total = torch.tensor([rank * scale])
    dist.all_reduce(total)
    return int(total)


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("boom on purpose")
    time.sleep(60)


def test_results_come_back_in_rank_order_and_failures_are_raised() -> None:
    assert run_ranks(2, sum_of_ranks, 10) == [10, 10]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1.*boom on purpose"):
        run_ranks(2, fail_on_rank_one)
    with pytest.raises(TimeoutError):
        run_ranks(1, _sleep, limit_seconds=2)
    assert time.monotonic() - start < 30


def _sleep(rank: int) -> None:
    time.sleep(60)
