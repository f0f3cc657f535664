"""The estimate of memory next to what the trainer's own steps take, counted by torch's profiler on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptool.ops.estimate import estimate
from tests.docs.pages import load_script

WIDE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 1024, "head_dim": 16}
LOGITS = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "head_dim": 16}


@pytest.mark.parametrize(
    ("sizes", "seq_len", "num_micro_steps", "checkpointing", "loss", "moment"),
    [
        (WIDE, 64, 1, "none", "chunked", "first block's backward"),
        (WIDE, 64, 3, "block", "chunked", "last block's backward"),
        (LOGITS, 384, 1, "none", "chunked", "loss"),
        (LOGITS, 384, 1, "none", "plain", "loss"),
        (LOGITS, 8, 1, "none", "chunked", "reduction of the root's gradients"),
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
    moment: str,
) -> None:
    benchmark = load_script("benchmarks/gpu/estimate.py")
    monkeypatch.setattr(benchmark, "NUM_STEPS", 1)
    config = benchmark.MODELS["small-llama"] | sizes | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    way = estimate(str(tmp_path), seq_len=seq_len, global_batch_size=num_micro_steps, loss=loss).details["ways"][
        2 + (checkpointing == "block")
    ]
    row = {"seq_len": seq_len, "micro_batch_size": 1, "num_micro_steps": num_micro_steps}
    with benchmark.tensor_peak("cpu") as peak:
        benchmark.train_steps(
            "cpu", tmp_path, row | {"param_dtype": "fp32", "checkpointing": checkpointing, "loss": loss}
        )
    assert way["peak_moment"] == moment
    assert way["peak_bytes"] == pytest.approx(peak[0], rel=0.1)
