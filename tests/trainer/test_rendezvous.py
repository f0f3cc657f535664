"""Ranks that torchrun started again find each other, not the dead."""

import threading

import pytest
import torch.distributed as dist

from ckptool import CkptoolError
from trainer.rendezvous import agree_on_name


def names_of(store, world_size):
    """What each rank agrees on, the last rank first to arrive."""
    names = {}
    threads = [
        threading.Thread(target=lambda r=rank: names.update({r: agree_on_name(store, r, world_size, 20)}))
        for rank in reversed(range(world_size))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [names[rank] for rank in range(world_size)]


def test_every_life_of_a_job_has_a_name_of_its_own():
    store = dist.HashStore()
    lives = [names_of(store, world_size) for world_size in (3, 3, 2, 4)]
    assert [len(set(names)) for names in lives] == [1, 1, 1, 1]
    assert len({names[0] for names in lives}) == 4


def test_greetings_of_the_dead_are_no_ranks():
    store = dist.HashStore()
    store.set("greeting/1", "of a rank that died before it was answered")
    assert len(set(names_of(store, 2))) == 1


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(CkptoolError, match="ranks 1 did not join"):
        agree_on_name(dist.HashStore(), 0, 2, limit_seconds=0.2)
    with pytest.raises(CkptoolError, match="rank 0 did not join"):
        agree_on_name(dist.HashStore(), 1, 2, limit_seconds=0.2)
