"""`ckptool estimate` next to the memory that trainer steps really take on one GPU.

    python benchmarks/gpu/estimate.py

Each row is a process of its own: a model of random weights, built, sharded and stepped by the trainer's own
functions, and the peak of its tensors (`torch.cuda.max_memory_allocated`). Random weights need as much memory as
trained ones. `--device cpu` counts the tensors of a CPU run by torch's profiler, on smaller models: attention has other
kernels there.
Writes benchmarks/results/estimate-{device}.md and .jsonl.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

RESULTS = Path(__file__).parents[1] / "results"
NUM_STEPS = 3
ROW_SECONDS = 300

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}


def _sizes(family: dict[str, Any], layers: int, hidden: int, mlp: int, heads: int, keys: int, **more: Any) -> dict:
    return {
        **family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 17,
        "tie_word_embeddings": False,
        **more,
    }


#: Configs by name. Shapes of models that people train, and small ones for CPUs.
MODELS = {
    "llama-1b": _sizes(_LLAMA, 16, 2048, 8192, 32, 8, tie_word_embeddings=True),
    "llama-3b": _sizes(_LLAMA, 28, 3072, 8192, 24, 8, tie_word_embeddings=True),
    "llama-7b": _sizes(_LLAMA, 32, 4096, 11008, 32, 32, vocab_size=32000),
    "qwen3-0.6b": _sizes(_QWEN, 28, 1024, 3072, 16, 8, vocab_size=151936, tie_word_embeddings=True),
    "qwen3-4b": _sizes(_QWEN, 36, 2560, 9728, 32, 8, vocab_size=151936, tie_word_embeddings=True),
    "small-llama": _sizes(_LLAMA, 6, 256, 768, 8, 4, vocab_size=4096),
    "small-qwen3": _sizes(_QWEN, 6, 256, 768, 8, 4, vocab_size=4096, head_dim=32),
}

#: (model, sequence length, micro batch, micro-steps, --param-dtype, --activation-checkpointing, --loss)
ROWS = {
    "cuda": [
        ("qwen3-0.6b", 4096, 1, 1, "fp32", "none", "chunked"),
        ("qwen3-0.6b", 4096, 1, 1, "fp32", "none", "plain"),
        ("qwen3-0.6b", 4096, 4, 1, "fp32", "block", "chunked"),
        ("llama-1b", 2048, 1, 1, "fp32", "none", "chunked"),
        ("llama-1b", 4096, 2, 1, "fp32", "none", "chunked"),
        ("llama-1b", 4096, 2, 1, "fp32", "none", "plain"),
        ("llama-1b", 4096, 8, 1, "fp32", "block", "chunked"),
        ("llama-1b", 4096, 1, 4, "fp32", "none", "chunked"),
        ("llama-1b", 4096, 1, 1, "bf16", "block", "chunked"),
        ("llama-3b", 4096, 1, 1, "fp32", "none", "chunked"),
        ("llama-3b", 8192, 2, 1, "fp32", "block", "chunked"),
        ("qwen3-4b", 4096, 2, 1, "fp32", "block", "chunked"),
        ("llama-7b", 4096, 1, 1, "bf16", "none", "chunked"),
        ("llama-7b", 4096, 4, 1, "bf16", "block", "chunked"),
    ],
    "cpu": [
        ("small-llama", 512, 1, 1, "fp32", "none", "chunked"),
        ("small-llama", 512, 1, 1, "fp32", "none", "plain"),
        ("small-llama", 512, 4, 1, "fp32", "block", "chunked"),
        ("small-llama", 16, 1, 1, "fp32", "none", "chunked"),
        ("small-llama", 16, 1, 3, "fp32", "none", "chunked"),
        ("small-llama", 512, 2, 1, "bf16", "none", "chunked"),
        ("small-qwen3", 512, 2, 1, "fp32", "none", "chunked"),
        ("small-qwen3", 512, 4, 1, "fp32", "block", "chunked"),
    ],
}


@click.group()
def main() -> None:
    pass


@main.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--only", help="Models whose names hold this.", default="")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Folder for the table and the rows.")
def compare(device: str, only: str, results: Path) -> None:
    """Measure every row and write the table. A row that fails is written as such."""
    rows = [measure(device, *row) for row in ROWS[device] if only in row[0]]
    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"estimate-{device}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"{machine(device)}, {NUM_STEPS} steps each\n\n{table(rows)}\n"
    stem.with_suffix(".md").write_text(text)
    print(text)


def measure(device: str, model: str, *setting: Any) -> dict[str, Any]:
    """One row: the estimate, and what a process of its own measured or why it failed."""
    names = ("seq_len", "micro_batch_size", "num_micro_steps", "param_dtype", "checkpointing", "loss")
    row: dict[str, Any] = {"model": model, **dict(zip(names, setting, strict=True))}
    with tempfile.TemporaryDirectory(prefix="estimate-") as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS[model]))
        row |= estimated(Path(name), row, device)
        command = [sys.executable, __file__, "step", device, name, json.dumps(row)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            row["error"] = f"not done after {ROW_SECONDS} s"
        else:
            if done.returncode:
                row["error"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            else:
                row |= json.loads(done.stdout.splitlines()[-1])
                row["ratio"] = round(row["estimated_bytes"] / row["measured_bytes"], 4)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def estimated(folder: Path, row: dict[str, Any], device: str) -> dict[str, Any]:
    """What `ckptool estimate` says of a row, on one GPU."""
    command = [sys.executable, "-m", "ckptool", "estimate", str(folder), "--json", "--gpus", "1", "--gpu-memory", "1TB"]
    command += ["--seq-len", str(row["seq_len"]), "--micro-batch-size", str(row["micro_batch_size"])]
    command += ["--global-batch-size", str(row["micro_batch_size"] * row["num_micro_steps"])]
    command += ["--param-dtype", row["param_dtype"], "--compute-dtype", "bf16", "--loss", row["loss"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr.strip())
    ways = json.loads(done.stdout)["ways"]
    way = next(w for w in ways if w["sharding"] == "fsdp2" and w["checkpointing"] == row["checkpointing"])
    return {"estimated_bytes": way["peak_bytes"], "moment": way["peak_moment"]}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| model | tokens | micro-steps | weights | checkpointing | loss | estimate GB | measured GB | ratio | at |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = f"{row['measured_bytes'] / 1e9:.3f}" if "measured_bytes" in row else row["error"]
        lines.append(
            f"| {row['model']} | {row['micro_batch_size']} x {row['seq_len']} | {row['num_micro_steps']} "
            f"| {row['param_dtype']} | {row['checkpointing']} | {row['loss']} | {row['estimated_bytes'] / 1e9:.3f} "
            f"| {measured} | {row.get('ratio', '')} | {row['moment']} |"
        )
    return "\n".join(lines)


def machine(device: str) -> str:
    """One line about where this was measured."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


@main.command()
@click.argument("device")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("row")
def step(device: str, folder: Path, row: str) -> None:
    """Train a few steps of a row, in this process, and print the peak of its tensors as JSON."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    with tensor_peak(device) as peak:
        train_steps(device, folder, json.loads(row))
    print(json.dumps({"measured_bytes": peak[0]}))


def train_steps(device: str, folder: Path, row: dict[str, Any]) -> None:
    """Steps as trainer/train.py makes them, on random weights and tokens."""
    import torch

    from ckptool import DataPosition, DataSource, Provenance
    from trainer import cli, parallel
    from trainer.build import build_state
    from trainer.config import TrainConfig
    from trainer.loss import use_chunks
    from trainer.origin import Origin
    from trainer.train import clip_gradients, forward_backward
    from trainer.units import MicroBatch

    options = ["--steps", str(NUM_STEPS), "--param-dtype", row["param_dtype"], "--compute-dtype", "bf16"]
    options += ["--activation-checkpointing", row["checkpointing"], "--micro-batch-size", str(row["micro_batch_size"])]
    options += ["--global-batch-size", str(row["micro_batch_size"] * row["num_micro_steps"])]
    settings = cli.command.make_context("trainer", options).params
    config = TrainConfig(**{name: value for name, value in settings.items() if name != "more_data"})
    (folder / "hf").mkdir()
    (folder / "config.json").rename(folder / "hf" / "config.json")
    origin = Origin(folder, False, Provenance(tool_version="", source={}), ())
    tokens = (row["micro_batch_size"], row["seq_len"])
    vocab = json.loads((folder / "hf" / "config.json").read_text())["vocab_size"]
    with parallel.joined_ranks(device) as ranks:
        sources = [DataSource("random", 1 << 20)]
        position = DataPosition.begin(sources, seq_len=tokens[1], seed=0, global_batch_size=config.global_batch_size)
        state = build_state(config, ranks, origin, position)
        with torch.no_grad():
            for parameter in state.parameters().values():
                parameter.fill_(1.0) if parameter.ndim < 2 else parameter.normal_(0, 0.02)
        if row["loss"] == "chunked" and (reason := use_chunks(state.model, ranks.device)):
            raise click.ClickException(reason)
        for _ in range(NUM_STEPS):
            batches = [
                MicroBatch((), torch.randint(vocab, tokens), torch.randint(vocab, tokens))
                for _ in range(row["num_micro_steps"])
            ]
            forward_backward(ranks, state, batches, tokens[0] * tokens[1] * len(batches))
            clip_gradients(state, config.grad_clip).item()
            state.optimizer.step()
            state.optimizer.zero_grad()


@contextmanager
def tensor_peak(device: str) -> Iterator[list[int]]:
    """A list that holds, once the block is left, the most bytes that tensors of `device` had at a time in it."""
    import torch

    found: list[int] = []
    if device == "cuda":
        yield found
        found.append(torch.cuda.max_memory_allocated())
        return
    gc.collect()  # what an earlier run left would be freed in this one, and its peak come out too low
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    assert profile.profiler is not None
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    allocations = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.total_allocated))
    _, first_bytes, first_total = min(allocations)  # totals go on from an earlier profile of the same process
    found.append(max(total for _, _, total in allocations) - (first_total - first_bytes))


if __name__ == "__main__":
    main()
