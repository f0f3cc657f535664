"""What FSDP2 gathers and when: embedding and head apart from the root, blocks once or twice, to the same gradients."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from tests.spawn import run_ranks
from tests.trainer.test_loss import assert_equal, loss_and_gradients, make_batch, make_model
from tests.trainer.tiny import DEVICE, tiny_config
from trainer import parallel, sharding
from trainer.loss import batch_loss, use_chunks
from trainer.model import named_blocks
from trainer.train import train

NUM_BLOCKS = 2


def trained(cut, tied, is_chunked):
    """The loss and gradients of a model that `cut` shards, and the gathers and reductions that they took."""
    with parallel.joined_ranks(DEVICE) as ranks:
        model = make_model(tie_word_embeddings=tied).to(ranks.device)
        cut(model, ranks)
        if is_chunked:
            assert use_chunks(model, ranks.device) == ""
        loss_and_gradients(model, ranks.device)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            found = loss_and_gradients(model, ranks.device)
        names = [event.name for event in trace.events()]
    gathered, reduced = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    return *found, names.count(gathered), names.count(reduced)


def cut_by_the_trainer(model, ranks, **options):
    sharding.shard(model, list(named_blocks(model).values()), ranks, torch.float64, **options)


def cut_into_blocks_and_root(model, ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
    for module in [*named_blocks(model).values(), model]:
        fully_shard(module, mesh=ranks.data_mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def cut_without_resharding(model, ranks):
    cut_by_the_trainer(model, ranks, reshard_after_forward=False)


def each_way(rank, tied, is_chunked):
    cuts = (cut_into_blocks_and_root, cut_by_the_trainer, cut_without_resharding)
    return [trained(cut, tied, is_chunked) for cut in cuts]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_embedding_and_head_are_gathered_apart_and_the_gradients_are_the_same(is_chunked):
    for usual, apart, kept in run_ranks(2, each_way, False, is_chunked):
        assert_equal(apart[:2], usual[:2])
        assert_equal(kept[:2], usual[:2])
        assert usual[2:] == (2 * NUM_BLOCKS + 1, NUM_BLOCKS + 1)
        assert apart[2:] == (2 * NUM_BLOCKS + 3, NUM_BLOCKS + 3)  # the root keeps the last norm
        assert kept[2:] == (NUM_BLOCKS + 3, NUM_BLOCKS + 3)


def test_tied_they_stay_with_the_root():
    for usual, apart, kept in run_ranks(2, each_way, True, True):
        assert_equal(apart[:2], usual[:2])
        assert_equal(kept[:2], usual[:2])
        assert apart[2:] == usual[2:]
        assert kept[2:] == (NUM_BLOCKS + 1, NUM_BLOCKS + 1)


def evaluated_between_steps(rank):
    """The loss without a gradient, of weights that a step has changed before: sharded, and as one process has it."""
    with parallel.joined_ranks(DEVICE) as ranks:
        losses = []
        for is_sharded in (False, True):
            model = make_model(tie_word_embeddings=False).to(ranks.device)
            if is_sharded:
                cut_by_the_trainer(model, ranks)
                assert use_chunks(model, ranks.device) == ""
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                batch_loss(model, make_batch(), ranks.device).backward()
                if not is_sharded:  # gradients of both ranks are summed
                    for parameter in model.parameters():
                        parameter.grad *= ranks.world_size
                optimizer.step()
                with torch.no_grad():
                    losses.append(batch_loss(model, make_batch(), ranks.device).item())
    return losses


def test_an_evaluation_between_steps_sees_the_weights_of_the_step_before_it():
    for losses in run_ranks(2, evaluated_between_steps):
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
        assert len(set(losses[:3])) == 3


def with_blocks_that_return_views(rank):
    """Loss and gradients, whole (times the ranks) and sharded; and the warnings."""
    with warnings.catch_warnings(record=True) as warned, parallel.joined_ranks(DEVICE) as ranks:
        warnings.simplefilter("always")
        found = []
        for is_sharded in (False, True):
            model = make_model("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0).to(ranks.device)
            if is_sharded:
                cut_by_the_trainer(model, ranks)
            loss, gradients = loss_and_gradients(model, ranks.device)
            scale = 1 if is_sharded else ranks.world_size
            found.append((loss, {name: gradient * scale for name, gradient in gradients.items()}))
    return *found, about_views(warned)


def about_views(warned):
    return [str(warning.message) for warning in warned if "returned a view" in str(warning.message)]


def test_blocks_that_return_views_have_the_same_gradients_and_no_warning():
    for whole, sharded, warned in run_ranks(2, with_blocks_that_return_views):
        assert sharded[0] == pytest.approx(whole[0])
        for name, gradient in whole[1].items():
            torch.testing.assert_close(sharded[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)
        assert warned == []


def with_split_layers(rank, root):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(tiny_config(root, tp=2, steps=1))
    return about_views(warned)


def test_logits_that_split_layers_return_as_a_view_are_left_as_they_are(root):
    assert run_ranks(2, with_split_layers, root) == [[], []]
