"""Out of memory: one line with numbers, and what to change, the cheapest first."""

import re

import pytest
import torch

from ckptool import CkptoolError
from tests.trainer.tiny import tiny_config
from trainer.memory_advice import MemoryAdvice
from trainer.stopwatch import Stopwatch

CPU = torch.device("cpu")


def run_out(config, hf_folder) -> CkptoolError:
    """The error of a run that wants more than there is, in the forward pass of step 8."""
    watch = Stopwatch()
    watch.begin(7)
    with (
        pytest.raises(CkptoolError) as caught,
        MemoryAdvice(config, hf_folder, 1, CPU).when_out_of_memory(watch),
        watch.phase_of("forward and backward"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


def gigabytes(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.e-]+) GB", text)]


def test_it_says_what_to_change_in_order_and_what_each_would_need(pristine):
    error = run_out(tiny_config(pristine, micro_batch_size=4, seq_len=512), pristine / "base" / "hf")
    assert re.match(r"out of memory in step 8 \(forward and backward\) \(estimated need: [\d.]+ GB\)$", str(error))
    advice = error.hint.split("; or ")
    assert [way.split(" (")[0] for way in advice] == [
        "--micro-batch-size 2",
        "--activation-checkpointing block",
        "--optimizer adamw8bit",
        "more ranks",
        "a smaller --seq-len than 512",
    ]
    [now] = gigabytes(str(error))
    needs = [gigabytes(way) for way in advice]
    assert [len(need) for need in needs] == [1, 1, 1, 0, 1]
    of_moments = needs.pop(2)
    assert 0 < of_moments[0] <= now  # a model this small has hardly any
    assert all(0 < need[0] < now for need in needs if need)


def test_smaller_micro_batches_are_no_way_out_where_a_second_one_costs_more_than_it_saves(pristine):
    """Alone, with the whole batch at once: then gradients of all weights would be added up in fp32."""
    settings = {"param_dtype": "bf16", "compute_dtype": "bf16", "micro_batch_size": 2, "global_batch_size": 2}
    error = run_out(tiny_config(pristine, **settings, seq_len=4, loss="plain"), pristine / "base" / "hf")
    assert error.hint.startswith("--activation-checkpointing block")
    error = run_out(tiny_config(pristine, **settings, seq_len=512), pristine / "base" / "hf")
    assert error.hint.startswith("--micro-batch-size 1")


@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"param_dtype": "keep"}])
def test_what_no_estimate_is_made_for_has_no_numbers(pristine, changes):
    error = run_out(tiny_config(pristine, **changes), pristine / "base" / "hf")
    assert gigabytes(f"{error} {error.hint}") == []


def test_another_error_is_no_lack_of_memory(tmp_path):
    advice = MemoryAdvice(tiny_config(tmp_path), tmp_path, 1, CPU)
    with pytest.raises(RuntimeError, match="shapes"), advice.when_out_of_memory(Stopwatch()):
        raise RuntimeError("shapes differ")
