"""The arithmetic of GPU memory, against figures that are known."""

from dataclasses import replace

import pytest

from ckptool.core.memory import CONTEXT_BYTES, ModelSizes, TrainingSetup, ddp_memory, fewest_gpus, fsdp_memory

GB = 10**9
LLAMA_7B = ModelSizes(
    block_parameters=(202_383_360,) * 32,
    root_parameters=262_148_096,
    head_parameters=131_072_000,
    vocab=32_000,
    hidden=4096,
    query=4096,
    key=4096,
    mlp=11_008,
)
LLAMA_1B = ModelSizes((60_821_504,) * 16, 262_670_336, 262_668_288, 128_256, 2048, 2048, 512, 8192)
LLAMA_8B = ModelSizes(
    (218_112_000,) * 32, 1_050_677_248, 525_336_576, 128_256, 4096, 4096, 1024, 14_336, embedding_parameters=525_336_576
)
BF16_WEIGHTS = TrainingSetup(seq_len=4096, parameter_bytes=2, optimizer_bytes=4)


def test_seven_billion_parameters_in_bf16_need_14_14_and_56_gb() -> None:
    exactly_7b = ModelSizes((200_000_000,) * 34, 200_000_000, 100_000_000, 32_000, 4096, 4096, 4096, 11_008)
    for memory in (ddp_memory, fsdp_memory):
        needs = memory(exactly_7b, BF16_WEIGHTS, "none")
        assert (needs.weights_bytes, needs.gradients_bytes, needs.optimizer_bytes) == (14 * GB, 14 * GB, 56 * GB)


def test_fsdp2_divides_the_states_and_ddp_does_not() -> None:
    eight = replace(BF16_WEIGHTS, num_shards=8)
    alone, sharded = fsdp_memory(LLAMA_7B, BF16_WEIGHTS, "block"), fsdp_memory(LLAMA_7B, eight, "block")
    assert sharded.optimizer_bytes * 8 == pytest.approx(alone.optimizer_bytes)
    assert sharded.activations_bytes == alone.activations_bytes
    assert ddp_memory(LLAMA_7B, eight, "block") == ddp_memory(LLAMA_7B, BF16_WEIGHTS, "block")


def test_a_llama_block_keeps_24_bytes_for_each_hidden_element_besides_its_mlp() -> None:
    """Two norms of 8 bytes, and q, k, v and attention's output in bf16: 24; the MLP 4 times its width in bf16."""
    one_block = replace(LLAMA_7B, block_parameters=(1,))
    two_blocks = replace(LLAMA_7B, block_parameters=(1, 1))
    needs = [fsdp_memory(m, BF16_WEIGHTS, "none").activations_bytes for m in (one_block, two_blocks)]
    assert needs[1] - needs[0] == 4096 * (4096 * 24 + 11_008 * 8)


def test_checkpointing_keeps_only_the_blocks_inputs() -> None:
    more = replace(LLAMA_7B, block_parameters=LLAMA_7B.block_parameters * 2)
    needs = [fsdp_memory(m, BF16_WEIGHTS, "block").activations_bytes for m in (LLAMA_7B, more)]
    assert needs[1] - needs[0] == 32 * 4096 * 4096 * 2


def test_the_loss_takes_12_bytes_a_logit() -> None:
    assert fsdp_memory(LLAMA_7B, BF16_WEIGHTS, "none").loss_bytes == 4096 * 32_000 * 12


def test_a_chunked_loss_takes_18_bytes_a_logit_of_a_chunk_and_the_gradients() -> None:
    gradients = LLAMA_7B.head_parameters * 4 + 4096 * LLAMA_7B.hidden * 2
    for chunk_elements, chunk_tokens in ((4096 * 32_000, 4096), (4095 * 32_000, 2048)):
        chunked = replace(BF16_WEIGHTS, loss_chunk_elements=chunk_elements)
        assert fsdp_memory(LLAMA_7B, chunked, "none").loss_bytes == gradients + chunk_tokens * 32_000 * 18


def test_gradients_and_activations_are_not_all_there_at_once() -> None:
    needs = fsdp_memory(LLAMA_7B, BF16_WEIGHTS, "none")
    parts = [needs.weights_bytes, needs.gradients_bytes, needs.optimizer_bytes, needs.activations_bytes]
    assert needs.peak_bytes < sum([*parts, needs.loss_bytes, needs.buffers_bytes])
    assert needs.peak_moment == "last block's backward"
    assert needs.needed_bytes >= needs.peak_bytes + CONTEXT_BYTES


def test_weights_that_stay_gathered_are_all_there_with_the_activations() -> None:
    sharded = replace(BF16_WEIGHTS, num_shards=8)
    kept = fsdp_memory(LLAMA_7B, replace(sharded, reshard_after_forward=False), "none")
    all_but_two_blocks = sum(LLAMA_7B.block_parameters[2:]) * 2
    assert kept.peak_bytes - fsdp_memory(LLAMA_7B, sharded, "none").peak_bytes == all_but_two_blocks


def test_accumulated_gradients_are_whole_and_fp32_on_every_rank() -> None:
    sharded = replace(BF16_WEIGHTS, num_shards=8)
    accumulating = fsdp_memory(LLAMA_7B, replace(sharded, num_micro_steps=2), "none")
    assert accumulating.peak_bytes - fsdp_memory(LLAMA_7B, sharded, "none").peak_bytes == LLAMA_7B.num_parameters * 4


@pytest.mark.parametrize("needed", [1, 2, 3, 17, 64])
def test_the_fewest_gpus_are_found(needed: int) -> None:
    assert fewest_gpus(lambda count: count >= needed, 1, 64) == needed
    assert fewest_gpus(lambda count: count >= needed, 4, 64) == -(-needed // 4) * 4


def test_no_number_of_gpus_may_be_enough() -> None:
    assert fewest_gpus(lambda count: count >= 65, 1, 64) is None


@pytest.mark.parametrize(
    ("model", "num_sequences", "checkpointing", "num_gpus", "resharded", "measured_gib"),
    [
        (LLAMA_1B, 4, "none", 1, True, 28.8),
        (LLAMA_1B, 4, "selective", 1, True, 18.8),
        (LLAMA_1B, 4, "block", 1, True, 12.0),
        (LLAMA_1B, 4, "none", 1, None, 28.3),
        (LLAMA_1B, 4, "selective", 1, None, 18.3),
        (LLAMA_1B, 4, "block", 1, None, 11.1),
        (LLAMA_8B, 2, "none", 1, None, 82.7),
        (LLAMA_8B, 2, "selective", 1, None, 64.7),
        (LLAMA_8B, 2, "block", 1, None, 60.3),
        (LLAMA_8B, 4, "none", 1, None, 117.1),
        (LLAMA_8B, 2, "none", 2, True, 62.2),
        (LLAMA_8B, 2, "none", 2, False, 75.2),
        (LLAMA_8B, 4, "none", 2, True, 96.6),
        (LLAMA_8B, 4, "none", 2, False, 109.6),
    ],
)
def test_the_estimate_is_what_compiled_steps_took_on_an_h200(
    model: ModelSizes,
    num_sequences: int,
    checkpointing: str,
    num_gpus: int,
    resharded: bool | None,
    measured_gib: float,
) -> None:
    """benchmarks/results/step-*.md. `resharded` is None without FSDP2."""
    setup = TrainingSetup(
        4096,
        num_sequences,
        num_shards=num_gpus,
        parameter_bytes=2,
        optimizer_bytes=2,
        loss_chunk_elements=1 << 28,
        compiled=True,
        reshard_after_forward=resharded is not False,
        alone=resharded is None,
    )
    assert fsdp_memory(model, setup, checkpointing).peak_bytes == pytest.approx(measured_gib * 2**30, rel=0.1)
