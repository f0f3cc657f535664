"""Do the fast ways of a training step train the same? Losses of 50 steps beside those of the plain eager model.

    python benchmarks/gpu/losses.py                 # about 3 minutes on one H200
    python benchmarks/gpu/losses.py --device cpu    # does every row run at all? on a tiny shape

Every row trains a Llama of the 1B shape from the same weights on the same text, weights and AdamW states in bf16. The
text is made up: the next token is a function of the last one, but for one in ten, so that the loss falls. `eager` is a
transformers model as it comes, with the cross-entropy of all its logits and torch's AdamW. Two rows are that model
again: as it is, since kernels may add up in another order, and with another attention kernel. Their differences are the
noise of bf16; those of the trainer's steps should be like them.
Writes benchmarks/results/losses.jsonl (every loss) and losses.md.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import step as steps
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(steps.TOP))

NUM_STEPS, WARMUP_STEPS, LR = 50, 10, 3e-5
NUM_TOKENS = 4000  # that the text is made of

Weights = dict[str, torch.Tensor]


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--shape", type=click.Choice(list(steps.SHAPES)), default="1b", show_default=True)
@click.option("--sequences", type=click.IntRange(1), default=2, show_default=True, help="Of 4096 tokens, in a step.")
@click.option("--results", type=click.Path(path_type=Path), default=steps.RESULTS)
def main(device: str, shape: str, sequences: int, results: Path) -> None:
    """Train every row, one after the other in this process."""
    setting = {"shape": shape if device == "cuda" else "tiny", "sequences": sequences, "ranks": 1}
    seq_len = steps.SEQ_LEN if device == "cuda" else 32
    weights = make_weights(setting, device)
    done: list[dict[str, Any]] = []
    for name, train in rows(device).items():
        try:
            row: dict[str, Any] = {"row": name, "losses": train(setting, device, seq_len, weights)}
        except Exception as error:  # the others may work
            row = {"row": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        done.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        results.mkdir(parents=True, exist_ok=True)
        (results / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in done))
        (results / "losses.md").write_text(table(done, setting, device))
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(table(done, setting, device))


def rows(device: str) -> dict[str, Callable[..., list[float]]]:
    """What is compared, by the name of its row; the first is what the others are compared with."""
    flash = [SDPBackend.FLASH_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
    return {
        "eager": eager,
        "eager, once more": eager,
        "eager, another attention kernel": with_attention(flash),
        "trainer: compiled, chunked loss": ours(),
        "the same, selective checkpointing": ours(checkpointing="selective"),
        "the same, fp8 rowwise": ours(code="trainer, fp8 rowwise"),
        "the same, fp8 tensorwise": ours(code="trainer, fp8 tensorwise"),
        "the same without fp8, FSDP2": ours(code="trainer, FSDP2"),  # the last, since it stays switched on
    }


def ours(**changes: Any) -> Callable[..., list[float]]:
    """The trainer's own step."""

    def train(setting: dict[str, Any], device: str, seq_len: int, weights: Weights) -> list[float]:
        fast = {"code": "trainer", "checkpointing": "none", "compile": True, "loss": "chunked"}
        text = batches(setting, device, seq_len)
        step, state = steps.trainer_state(setting | fast | changes, device, seq_len, batches=text)
        with torch.no_grad():
            for name, parameter in state.parameters().items():
                getattr(parameter, "to_local", lambda p=parameter: p)().copy_(weights[name])
        return run(step, state.optimizer)

    return train


def eager(setting: dict[str, Any], device: str, seq_len: int, weights: Weights) -> list[float]:
    """A transformers model, and the loss of all its logits."""
    config = transformers.AutoConfig.for_model(**steps.SHAPES[setting["shape"]])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text = batches(setting, device, seq_len)

    def step() -> float:
        inputs, labels = (tensor.to(device) for tensor in next(text))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run(step, optimizer)


def with_attention(backends: list[SDPBackend]) -> Callable[..., list[float]]:
    """The eager model, whose attention is computed by one of these."""

    def train(*arguments: Any) -> list[float]:
        with sdpa_kernel(backends):
            return eager(*arguments)

    return train


def run(step: Callable[[], float], optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of each step, at a rate that rises and stays."""
    losses = []
    for number in range(1, NUM_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, number / WARMUP_STEPS)
            group["weight_decay"] = 0.1
        losses.append(step())
    return losses


def make_weights(setting: dict[str, Any], device: str) -> Weights:
    """Random weights by name, in bf16."""
    config = transformers.AutoConfig.for_model(**steps.SHAPES[setting["shape"]])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    made = {name: torch.ones(p.shape, dtype=p.dtype, device=device) for name, p in model.named_parameters()}
    for tensor in made.values():
        if tensor.ndim > 1:
            tensor.normal_(0, 0.02)
    return made


def batches(setting: dict[str, Any], device: str, seq_len: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels, each (sequences, tokens)."""
    num_tokens = min(NUM_TOKENS, steps.SHAPES[setting["shape"]]["vocab_size"])
    generator = torch.Generator().manual_seed(1)
    following = torch.randperm(num_tokens, generator=generator)
    while True:
        tokens = torch.randint(num_tokens, (setting["sequences"], seq_len + 1), generator=generator)
        is_random = torch.rand(tokens.shape, generator=generator) < 0.1
        for place in range(1, seq_len + 1):
            tokens[:, place] = torch.where(is_random[:, place], tokens[:, place], following[tokens[:, place - 1]])
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def table(done: list[dict[str, Any]], setting: dict[str, Any], device: str) -> str:
    """A Markdown table of the differences from the first row."""
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [
        f"Llama, shape {setting['shape']}, {setting['sequences']} sequences a step, {NUM_STEPS} steps, bf16, {where}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; differences from the losses of the first "
        "row, by them",
        "",
        "| | loss of step 1 | 10 | 50 | largest difference in steps 1 to 10 | largest in all | mean |",
        "|---|---|---|---|---|---|---|",
    ]
    expected = done[0].get("losses", [])
    for row in done:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['error'].replace('|', '/')} | | | | | |")
            continue
        losses = row["losses"]
        sizes = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
        found = f"{max(sizes[:10]):.1e} | {max(sizes):.1e} | {statistics.mean(sizes):.1e}"
        shown = " | ".join(f"{losses[step - 1]:.4f}" for step in (1, 10, NUM_STEPS))
        lines.append(f"| {row['row']} | {shown} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with contextlib.chdir(steps.TOP):
        main()
