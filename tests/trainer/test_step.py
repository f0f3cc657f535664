"""What one step does to the gradients on their way to the weights."""

import math
import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests.spawn import run_ranks
from tests.trainer.tiny import run, tiny_config
from trainer import train
from trainer.optimizer import build_optimizer


def reductions(rank, root):
    """How often the ranks add gradients up in a step: with one micro-batch, and with three."""
    counts = []
    for micro_batch_size in (3, 1):
        config = tiny_config(root / str(micro_batch_size), steps=1, micro_batch_size=micro_batch_size)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train.train(config)
        counts.append(sum("reduce_scatter" in event.name for event in trace.events()))
    return counts


def test_gradients_meet_in_the_last_micro_step_only(pristine, tmp_path):
    for micro_batch_size in (3, 1):
        shutil.copytree(pristine, tmp_path / str(micro_batch_size))
    for once, of_three in run_ranks(2, reductions, tmp_path):
        assert once == of_three > 0


def norms(rank, root, grad_clip):
    """The norm of all gradients as the trainer says it, and of what the optimizer has taken of them.

    The first step's moments tell: they are 1 - beta1 = 0.1 of the gradients.
    """
    clip_gradients, is_shown, states = train.clip_gradients, train.is_shown, []
    found = []

    def clip(state, max_norm):
        states.append(state)
        return clip_gradients(state, max_norm)

    def after_step(config, metrics):
        moments = [state["exp_avg"] for state in states[0].optimizer.state.values()]
        whole = [moment.full_tensor() if isinstance(moment, DTensor) else moment for moment in moments]
        taken = math.sqrt(sum(moment.double().square().sum().item() for moment in whole)) / 0.1
        found[:] = metrics.grad_norm, taken
        return is_shown(config, metrics)

    train.clip_gradients, train.is_shown = clip, after_step
    train.train(tiny_config(root, steps=1, grad_clip=grad_clip))
    return found


def test_clipping_is_by_the_norm_of_all_shards(root, tmp_path):
    shutil.copytree(root, tmp_path / "other")
    [(whole, unclipped)] = run_ranks(1, norms, tmp_path / "other", 0.0)
    assert whole == pytest.approx(unclipped, rel=1e-5)
    for before, after in run_ranks(2, norms, root, 0.1):
        assert before == pytest.approx(whole, rel=1e-5)
        assert after == pytest.approx(0.1, rel=1e-4)


def test_matrices_decay_and_vectors_do_not():
    weights = {"matrix": torch.nn.Parameter(torch.ones(2, 2)), "norm": torch.nn.Parameter(torch.ones(2))}
    optimizer = build_optimizer(weights, lr=0.5, weight_decay=0.1)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weights["norm"], torch.ones(2))
    assert torch.allclose(weights["matrix"], torch.full((2, 2), 0.95))


def switches(rank, root):
    train.train(tiny_config(root, steps=1, deterministic=True))
    return torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_asks_torch_for_it(root):
    assert run_ranks(1, switches, root) == [True]


def test_offloaded_to_the_host_it_trains_the_same(root, tmp_path):
    other = shutil.copytree(root, tmp_path / "other")
    plain, offloaded = run(root, steps=2), run(other, steps=2, cpu_offload=True)
    for one, two in zip(plain, offloaded, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
