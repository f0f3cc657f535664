"""Training steps on GPUs: the trainer's own step, torchtitan's and the usual tutorial's code, in turn, on the same
shapes.

    python benchmarks/gpu/step.py --shape 8b              # all rows of a shape, under 8 minutes on one H200
    python benchmarks/gpu/step.py --shape 8b --ranks 2    # the rows of several GPUs, under torchrun
    python benchmarks/gpu/step.py --sequences 4           # other than the usual number a step and GPU
    python benchmarks/gpu/step.py --device cpu            # does every row run at all? on a tiny shape, no figures

Each row is a process of its own and is written as soon as it is done. All train random weights in bf16 with AdamW
states in bf16, sequence 4096, gradients clipped to 1.

* trainer: the step of trainer/train.py. On one GPU it does without FSDP2; `trainer, FSDP2` has it there too.
  `trainer, fp8` has the blocks' products in 8 bits, with one scale a tensor or (`rowwise`) one a row; its MFU is of
  the peak of bf16 all the same. `trainer, adamw8bit` keeps the moments in 8 bits.
* torchtitan: its Llama, parallelized by its own functions as its train.py calls them, its loss, clipping and optimizer.
  On one GPU it too does without FSDP2, and `torchtitan, FSDP2` has it. Its Llama has no tied embeddings: in the 1B
  shape it has a head of its own, whose parameters don't count in its MFU.
* `no resharding`, of both: FSDP2 keeps a block's gathered weights until its backward pass.
* tutorial: FSDP2 on a transformers model in eager mode, cross-entropy of all logits, `checkpoint_wrapper` around each
  layer, `AdamW(fused=True)`.

MFU = (6 N + 12 L H S) x tokens/s / 989e12: N parameters (of tied ones one), L layers, H features, S tokens a sequence;
recomputation doesn't count. (Chowdhery et al., PaLM, 2022, appendix B.) 989e12 FLOP/s: NVIDIA's figure for dense bf16.
After the timed steps two more run under torch.profiler: where their time went is in the raw rows.
Writes benchmarks/results/step-{shape}-{ranks}gpu.jsonl and .md, with -{sequences}seq where those are given.
"""

from __future__ import annotations

import contextlib
import json
import os
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

#: Sequences a step and GPU.
SEQUENCES = {"8b": 2, "1b": 4, "tiny": 2}

#: (whose code, activation checkpointing, compiled, loss), the ones that matter most first.
ROWS = [
    ("trainer", "none", True, "chunked"),
    ("torchtitan", "none", True, "plain"),
    ("trainer", "selective", True, "chunked"),
    ("torchtitan", "selective", True, "plain"),
    ("trainer", "block", True, "chunked"),
    ("torchtitan", "block", True, "plain"),
    ("tutorial", "block", False, "plain"),
    ("trainer, FSDP2", "none", True, "chunked"),
    ("torchtitan, FSDP2", "none", True, "plain"),
    ("trainer, fp8", "none", True, "chunked"),
    ("trainer, fp8", "selective", True, "chunked"),
    ("trainer, fp8 rowwise", "none", True, "chunked"),
    ("trainer, adamw8bit", "none", True, "chunked"),
    ("trainer, adamw8bit", "none", False, "chunked"),
    ("trainer", "block", False, "chunked"),
]
ROWS_OF_SEVERAL = [
    ("trainer", "none", True, "chunked"),
    ("torchtitan", "none", True, "plain"),
    ("trainer, no resharding", "none", True, "chunked"),
    ("torchtitan, no resharding", "none", True, "plain"),
    ("trainer", "selective", True, "chunked"),
    ("torchtitan", "selective", True, "plain"),
]
#: What a row's process leaves at its end.
_joined = contextlib.ExitStack()

_FIELDS = ("code", "checkpointing", "compile", "loss")


@click.group(invoke_without_command=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1b", show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.option("--sequences", type=click.IntRange(1), help="Sequences a step and GPU (default: by the shape).")
@click.option("--only", multiple=True, help="Only rows that have these words, e.g. `trainer none`. Can be repeated.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--seconds", type=float, default=470, show_default=True, help="When they are over nothing is begun.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
@click.pass_context
def main(
    context: click.Context,
    shape: str,
    ranks: int,
    sequences: int | None,
    only: tuple[str, ...],
    device: str,
    seconds: float,
    results: Path,
) -> None:
    """Measure every row, each in a process of its own."""
    if context.invoked_subcommand:
        return
    began = time.monotonic()
    results.mkdir(parents=True, exist_ok=True)
    shape = shape if device == "cuda" else "tiny"
    stem = results / (f"step-{shape}-{ranks}gpu" + (f"-{sequences}seq" if sequences else ""))
    done: list[dict[str, Any]] = []
    for values in ROWS if ranks == 1 else ROWS_OF_SEVERAL:
        row = dict(zip(_FIELDS, values, strict=True)) | {"shape": shape, "ranks": ranks}
        row["sequences"] = sequences or SEQUENCES[shape]
        words = " ".join(map(str, values)).split()
        if only and not any(all(word in words for word in wanted.split()) for wanted in only):
            continue
        left = seconds - (time.monotonic() - began)
        if left < ROW_SECONDS / 3:
            row["error"] = "no time left"
        else:
            row |= _in_process(row, device, min(ROW_SECONDS, left))
        done.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in done))
        stem.with_suffix(".md").write_text(table(done))
    print(table(done))


def _in_process(row: dict[str, Any], device: str, limit_seconds: float) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row['ranks']}"]
    command = [sys.executable, *(torchrun if row["ranks"] > 1 else []), __file__, "row", device, json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_seconds:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    where = next((row["machine"] for row in rows if "machine" in row), "")
    shape, ranks = rows[0]["shape"], rows[0]["ranks"]
    lines = [
        f"Llama, shape {shape}, {rows[0]['sequences']} sequences a step and GPU, {ranks} x {where}; tokens/s of a GPU",
        "",
        "| code | checkpointing | compile | loss | tokens/s | MFU % | step ms | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = " | ".join(str(row[name]) for name in _FIELDS)
        if "error" in row:
            lines.append(f"| {head} | {row['error'].replace('|', '/')} | | | |")
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
    seq_len = SEQ_LEN if device == "cuda" else 32
    step, model = CODES[setting["code"].split(",")[0]](setting, device, seq_len)
    losses = [step() for _ in range(4 if device == "cuda" else 1)]  # compilation, then warm clocks
    seconds = []
    for _ in range(12 if device == "cuda" else 1):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    peak_gib = round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0
    shape = SHAPES[setting["shape"]]
    tokens_per_second = setting["sequences"] * seq_len / statistics.median(seconds)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if shape["tie_word_embeddings"] and setting["code"].startswith("torchtitan"):
        num_parameters -= shape["vocab_size"] * shape["hidden_size"]
    attention_flops = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * seq_len
    found = {
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": round((6 * num_parameters + attention_flops) * tokens_per_second / PEAK_FLOPS, 4),
        "step_ms": [round(1000 * second, 1) for second in seconds],
        "peak_gib": peak_gib,
        "losses": [round(loss, 4) for loss in losses],
        "profile": profiled(step, device),
        "machine": f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)


def profiled(step: Callable[[], float], device: str) -> list[str]:
    """Where the time of two steps went, as the trainer's `--profile` says it."""
    from torch.profiler import ProfilerActivity, profile

    from trainer.profiling import table as kinds

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        step()
    return kinds(list(profiler.events() or []), device)


def _join(device: str) -> None:
    """The process group of torchrun's ranks, or of this one alone."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **({} if "RANK" in os.environ else alone))


def tutorial(setting: dict[str, Any], device: str, seq_len: int) -> tuple[Callable[[], float], Any]:
    """FSDP2 as its tutorial has it, around a transformers model."""
    import functools

    import torch
    import transformers
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _join(device)
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


def torchtitan(setting: dict[str, Any], device: str, seq_len: int) -> tuple[Callable[[], float], Any]:
    """torchtitan 0.2's Llama and training step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import utils
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra import parallelize

    _join(device)
    shape = SHAPES[setting["shape"]]
    # Features of the MLP: 8 H / 3, times the factor, rounded up to the multiple.
    factor, multiple = {"8b": (1.3, 1024), "1b": (1.5, 256), "tiny": (1.0, 64)}[setting["shape"]]
    arguments = TransformerModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        vocab_size=shape["vocab_size"],
        rope_theta=shape["rope_theta"],
        ffn_dim_multiplier=factor,
        multiple_of=multiple,
        max_seq_len=seq_len,
    )
    config = JobConfig()
    config.activation_checkpoint.mode = {"block": "full"}.get(setting["checkpointing"], setting["checkpointing"])
    config.activation_checkpoint.selective_ac_option = "op"
    compiles = setting["compile"] and device == "cuda"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Transformer(arguments)
    torch.set_default_dtype(torch.float32)
    if setting["checkpointing"] != "none":
        parallelize.apply_ac(
            model,
            config.activation_checkpoint,
            model_compile_enabled=compiles,
            op_sac_save_list=parallelize._op_sac_save_list,
        )
    if compiles:
        parallelize.apply_compile(model, config.compile)
    if "FSDP2" in setting["code"] or dist.get_world_size() > 1:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = "never" if "no resharding" in setting["code"] else "default"
        parallelize.apply_fsdp(
            model, mesh, torch.bfloat16, torch.float32, pp_enabled=False, reshard_after_forward_policy=policy
        )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    loss_of = torch.compile(cross_entropy_loss) if compiles else cross_entropy_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = _batches(setting, seq_len)

    def step() -> float:
        inputs, labels = (tensor.to(device) for tensor in next(batches))
        logits = model(inputs)
        loss = loss_of(logits, labels) / labels.numel()
        del logits
        loss.backward()
        utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        # Its own loop waits for the loss in the steps that it logs only: here too nothing waits for the update.
        found = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step, model


def trainer(setting: dict[str, Any], device: str, seq_len: int) -> tuple[Callable[[], float], Any]:
    """The step of trainer/train.py."""
    step, state = trainer_state(setting, device, seq_len)
    return step, state.model


def trainer_state(
    setting: dict[str, Any],
    device: str,
    seq_len: int,
    before_update: Callable[[], None] = lambda: None,
    batches: Iterator[tuple[Any, Any]] | None = None,
) -> tuple[Callable[[], float], Any]:
    """The step of trainer/train.py and the TrainingState that it trains; `before_update` is called in each step.

    `batches` are inputs and labels, each (sequences, tokens); random ones if not given.
    """
    import torch

    from ckptool import DataPosition, DataSource, Provenance
    from trainer import build, cli, parallel, sharding
    from trainer.config import TrainConfig
    from trainer.loss import use_chunks
    from trainer.origin import Origin
    from trainer.train import clip_gradients, forward_backward, prepare_update
    from trainer.units import MicroBatch

    options = ["--steps", "100", "--param-dtype", "bf16", "--compute-dtype", "bf16", "--device", device]
    options += ["--activation-checkpointing", setting["checkpointing"], "--loss", setting["loss"], "--lr", "1e-5"]
    options += ["--global-batch-size", str(setting["sequences"] * setting.get("ranks", 1))]
    options += ["--micro-batch-size", str(setting["sequences"])]
    options += ["--compile"] if setting["compile"] and device == "cuda" else []
    options += ["--no-reshard-after-forward"] if "no resharding" in setting.get("code", "") else []
    options += ["--optimizer", "adamw8bit"] if "adamw8bit" in setting.get("code", "") else []
    if "fp8" in setting.get("code", ""):
        options += ["--fp8", "rowwise" if "rowwise" in setting["code"] else "tensorwise"]
    settings = cli.command.make_context("trainer", options).params
    config = TrainConfig(**{name: value for name, value in settings.items() if name != "more_data"})
    folder = Path(tempfile.mkdtemp(prefix="step-"))
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(SHAPES[setting["shape"]]))
    origin = Origin(folder, False, Provenance(tool_version="", source={}), ())
    ranks = _joined.enter_context(parallel.joined_ranks(device))
    position = DataPosition.begin(
        [DataSource("random", 1 << 20)], seq_len=seq_len, seed=0, global_batch_size=config.global_batch_size
    )
    if "FSDP2" in setting.get("code", ""):
        sharding.gains_nothing_from_sharding = lambda *_: False
    state = build.build_state(config, ranks, origin, position)
    with torch.no_grad():
        for parameter in state.parameters().values():
            parameter.fill_(1.0) if parameter.ndim < 2 else parameter.normal_(0, 0.02)
    if config.loss == "chunked" and (reason := use_chunks(state.model, ranks.device, config.compile)):
        raise click.ClickException(reason)
    batches = batches or _batches(setting, seq_len)

    def step() -> float:
        inputs, labels = next(batches)
        loss, _ = forward_backward(ranks, state, [MicroBatch((), inputs, labels)], labels.numel() * ranks.world_size)
        norm = clip_gradients(state, config.grad_clip)
        prepare_update(state.optimizer)
        mean_loss, _ = ranks.sum(loss, known=[norm])
        before_update()
        state.optimizer.step()
        state.optimizer.zero_grad()
        return mean_loss

    return step, state


def _batches(setting: dict[str, Any], seq_len: int) -> Iterator[tuple[Any, Any]]:
    """Random tokens, the same for each row of a shape and rank."""
    import torch

    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    vocab_size = SHAPES[setting["shape"]]["vocab_size"]
    while True:
        tokens = torch.randint(vocab_size, (setting["sequences"], seq_len + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CODES = {"trainer": trainer, "torchtitan": torchtitan, "tutorial": tutorial}

if __name__ == "__main__":
    main()
