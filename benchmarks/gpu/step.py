"""Training steps on one GPU: the trainer's own step and the usual tutorial's code, in turn, on the same shapes.

    python benchmarks/gpu/step.py                     # all rows, under 8 minutes on one H200
    python benchmarks/gpu/step.py --only 1b           # rows whose name holds a word
    python benchmarks/gpu/step.py --device cpu        # does every row run at all? on a tiny shape, no figures

Each row is a process of its own and is written as soon as it is done. All train random weights in bf16 with AdamW
states in bf16, under FSDP2 on a mesh of one rank, sequence 4096. The tutorial's code: a transformers model in eager
mode, cross-entropy of all logits, `checkpoint_wrapper` around each layer, `AdamW(fused=True)`, gradients clipped to 1.

MFU = (6 N + 12 L H S) x tokens/s / 989e12: N parameters (of tied ones one), L layers, H features, S tokens a sequence;
recomputation doesn't count. (Chowdhery et al., PaLM, 2022, appendix B.) 989e12 FLOP/s: NVIDIA's figure for dense bf16.
Writes benchmarks/results/step.jsonl and step.md.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

TOP = Path(__file__).parents[2]
RESULTS = TOP / "benchmarks" / "results"
PEAK_FLOPS = 989e12
SEQ_LEN = 4096
ROW_SECONDS = 110
BUDGET_SECONDS = 470

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "1b": {
        **_LLAMA,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
}

#: (shape, sequences a step, whose code, activation checkpointing, compiled, loss), the ones that matter most first.
ROWS = [
    ("8b", 2, "tutorial", "block", False, "plain"),
    ("8b", 2, "trainer", "none", True, "chunked"),
    ("8b", 2, "trainer", "selective", True, "chunked"),
    ("8b", 2, "trainer", "block", True, "chunked"),
    ("1b", 4, "tutorial", "block", False, "plain"),
    ("1b", 4, "trainer", "none", True, "chunked"),
    ("1b", 4, "trainer", "selective", True, "chunked"),
    ("1b", 4, "trainer", "block", True, "chunked"),
    ("8b", 2, "trainer", "block", True, "plain"),
    ("8b", 2, "trainer", "block", False, "chunked"),
]
#: What a row's process leaves at its end.
_joined = contextlib.ExitStack()

_FIELDS = ("shape", "sequences", "code", "checkpointing", "compile", "loss")


@click.group(invoke_without_command=True)
@click.option("--only", default="", help="Only rows whose text holds this, e.g. `8b trainer`.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
@click.pass_context
def main(context: click.Context, only: str, device: str, results: Path) -> None:
    """Measure every row, each in a process of its own."""
    if context.invoked_subcommand:
        return
    began = time.monotonic()
    results.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    for values in ROWS:
        if not all(word in " ".join(map(str, values)) for word in only.split()):
            continue
        row = dict(zip(_FIELDS, values, strict=True))
        left = BUDGET_SECONDS - (time.monotonic() - began)
        if left < ROW_SECONDS / 3:
            row["error"] = "no time left"
        else:
            row |= _in_process(row, device, min(ROW_SECONDS, left))
        done.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        (results / "step.jsonl").write_text("".join(json.dumps(line) + "\n" for line in done))
        (results / "step.md").write_text(table(done))
    print(table(done))


def _in_process(row: dict[str, Any], device: str, limit_seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "row", device, json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    where = next((row["machine"] for row in rows if "machine" in row), "")
    lines = [
        where,
        "",
        "| shape | sequences | code | checkpointing | compile | loss | tokens/s | MFU % | step ms | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = " | ".join(str(row[name]) for name in _FIELDS)
        if "error" in row:
            lines.append(f"| {head} | {row['error']} | | | |")
            continue
        spread = f"{min(row['step_ms']):.0f} to {max(row['step_ms']):.0f}"
        lines.append(
            f"| {head} | {row['tokens_per_second']:,.0f} | {row['mfu'] * 100:.1f} | {spread} | {row['peak_gib']:.1f} |"
        )
    return "\n".join(lines) + "\n"


@main.command()
@click.argument("device")
@click.argument("text")
def row(device: str, text: str) -> None:
    """Measure one row in this process, and print it as JSON."""
    sys.path.insert(0, str(TOP))
    import torch
    import transformers

    setting = json.loads(text)
    if device == "cpu":
        setting["shape"] = "tiny"
    seq_len = SEQ_LEN if device == "cuda" else 32
    step, model = (tutorial if setting["code"] == "tutorial" else trainer)(setting, device, seq_len)
    losses = [step() for _ in range(4 if device == "cuda" else 1)]  # compilation, then warm clocks
    seconds = []
    for _ in range(12 if device == "cuda" else 1):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    shape = SHAPES[setting["shape"]]
    tokens_per_second = setting["sequences"] * seq_len / statistics.median(seconds)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    attention_flops = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * seq_len
    found = {
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": round((6 * num_parameters + attention_flops) * tokens_per_second / PEAK_FLOPS, 4),
        "step_ms": [round(1000 * second, 1) for second in seconds],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0,
        "losses": [round(loss, 4) for loss in losses],
        "machine": f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }
    print(json.dumps(found), flush=True)


def tutorial(setting: dict[str, Any], device: str, seq_len: int) -> tuple[Callable[[], float], Any]:
    """FSDP2 as its tutorial has it, around a transformers model."""
    import functools

    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.HashStore()
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    config = transformers.AutoConfig.for_model(**SHAPES[setting["shape"]])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    layers = type(model.model.layers[0])
    wrap = functools.partial(wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT)
    wrapping.apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, layers)
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.model.layers, model]:
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = _batches(setting, seq_len)

    def step() -> float:
        inputs, labels = (tensor.to(device) for tensor in next(batches))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model


def trainer(setting: dict[str, Any], device: str, seq_len: int) -> tuple[Callable[[], float], Any]:
    """The step of trainer/train.py."""
    step, state = trainer_state(setting, device, seq_len)
    return step, state.model


def trainer_state(
    setting: dict[str, Any], device: str, seq_len: int, before_update: Callable[[], None] = lambda: None
) -> tuple[Callable[[], float], Any]:
    """The step of trainer/train.py and the TrainingState that it trains; `before_update` is called in each step."""
    import torch

    from ckptool import DataPosition, DataSource, Provenance
    from trainer import cli, parallel
    from trainer.build import build_state
    from trainer.checkpoint import Origin
    from trainer.config import TrainConfig
    from trainer.loss import use_chunks
    from trainer.train import clip_gradients, forward_backward
    from trainer.units import MicroBatch

    options = ["--steps", "100", "--param-dtype", "bf16", "--compute-dtype", "bf16", "--device", device]
    options += ["--activation-checkpointing", setting["checkpointing"], "--loss", setting["loss"], "--lr", "1e-5"]
    options += ["--compile"] if setting["compile"] and device == "cuda" else []
    settings = cli.command.make_context("trainer", options).params
    config = TrainConfig(**{name: value for name, value in settings.items() if name != "more_data"})
    folder = Path(tempfile.mkdtemp(prefix="step-"))
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(SHAPES[setting["shape"]]))
    origin = Origin(folder, False, Provenance(tool_version="", source={}), ())
    ranks = _joined.enter_context(parallel.joined_ranks(device))
    position = DataPosition.begin(
        [DataSource("random", 1 << 20)], seq_len=seq_len, seed=0, global_batch_size=setting["sequences"]
    )
    state = build_state(config, ranks, origin, position)
    with torch.no_grad():
        for parameter in state.parameters().values():
            parameter.fill_(1.0) if parameter.ndim < 2 else parameter.normal_(0, 0.02)
    if config.loss == "chunked" and (reason := use_chunks(state.model, ranks.device, config.compile)):
        raise click.ClickException(reason)
    batches = _batches(setting, seq_len)

    def step() -> float:
        inputs, labels = next(batches)
        loss, _ = forward_backward(ranks, state, [MicroBatch((), inputs, labels)], labels.numel())
        clip_gradients(state, config.grad_clip).item()
        before_update()
        state.optimizer.step()
        state.optimizer.zero_grad()
        return loss.item()

    return step, state


def _batches(setting: dict[str, Any], seq_len: int) -> Iterator[tuple[Any, Any]]:
    """Random tokens, the same for each row of a shape."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocab_size = SHAPES[setting["shape"]]["vocab_size"]
    while True:
        tokens = torch.randint(vocab_size, (setting["sequences"], seq_len + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    main()
