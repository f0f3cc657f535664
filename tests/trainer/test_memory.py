"""The estimate of memory next to what the trainer's own steps take, counted by torch's profiler on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ckptool.core.memory import CHECKPOINTING, compiled_bytes_per_token
from ckptool.ops.estimate import estimate, read_sizes
from tests.docs.pages import load_script

WIDE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 1024, "head_dim": 16}
LOGITS = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "head_dim": 16}


@pytest.mark.parametrize(
    ("sizes", "seq_len", "num_micro_steps", "checkpointing", "loss", "dtype", "moment"),
    [
        (WIDE, 64, 1, "none", "chunked", "fp32", "first block's backward"),
        (WIDE, 64, 3, "block", "chunked", "fp32", "last block's backward"),
        (WIDE, 64, 3, "selective", "chunked", "fp32", "last block's backward"),
        (LOGITS, 384, 1, "none", "chunked", "fp32", "loss"),
        (LOGITS, 384, 1, "none", "plain", "fp32", "loss"),
        (LOGITS, 8, 1, "none", "chunked", "fp32", "reduction of the last gradients"),
        # without FSDP2
        (WIDE, 64, 1, "none", "chunked", "bf16", "first block's backward"),
        (LOGITS, 384, 1, "none", "chunked", "bf16", "loss"),
    ],
)
def test_the_estimate_is_what_steps_take(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sizes: dict[str, Any],
    seq_len: int,
    num_micro_steps: int,
    checkpointing: str,
    loss: str,
    dtype: str,
    moment: str,
) -> None:
    benchmark = load_script("benchmarks/gpu/estimate.py")
    monkeypatch.setattr(benchmark, "NUM_STEPS", 1)
    config = benchmark.MODELS["small-llama"] | sizes | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = estimate(str(tmp_path), seq_len=seq_len, global_batch_size=num_micro_steps, loss=loss, param_dtype=dtype)
    way = said.details["ways"][3 + CHECKPOINTING.index(checkpointing)]
    row = {"seq_len": seq_len, "micro_batch_size": 1, "num_micro_steps": num_micro_steps}
    with benchmark.tensor_peak("cpu") as peak:
        benchmark.train_steps(
            "cpu", tmp_path, row | {"param_dtype": dtype, "checkpointing": checkpointing, "loss": loss}
        )
    assert way["peak_moment"] == moment
    assert way["peak_bytes"] == pytest.approx(peak[0], rel=0.1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_compiled_block_keeps_what_the_estimate_says(model_type: str, tmp_path: Path) -> None:
    benchmark = load_script("benchmarks/gpu/estimate.py")
    config = benchmark.MODELS[f"small-{model_type}"] | {"intermediate_size": 896, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    seq_len = 256
    hidden = torch.randn(1, seq_len, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = model.rotary_emb(hidden, torch.arange(seq_len)[None])
    # The backend that partitions as inductor does, and then runs the parts as they are.
    block = torch.compile(model.layers[0], backend="aot_eager_decomp_partition")
    ours = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *angles]}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, position_embeddings=angles, attention_mask=None)
    per_token = compiled_bytes_per_token(read_sizes(tmp_path)[0], compute=2)
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(seq_len * per_token, rel=0.03)
