"""An update of all weights of a Llama on one GPU: torch's fused AdamW with its clipping, and the trainer's, in turn.

    python benchmarks/gpu/optimizer.py                              # half a minute on one H200
    python benchmarks/gpu/optimizer.py --device cpu --shape tiny    # does every row run at all?

Weights and gradients are bf16 and random, and so are the moments but where weights are rounded by chance: fp32. Every
row is the median of `--rounds` calls, each waited for. `host` is what a call takes until it returns: the GPU can't be
given other work before that.
Writes benchmarks/results/optimizer-{shape}.jsonl and .md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import step as steps
import torch
import transformers

sys.path.insert(0, str(steps.TOP))

from trainer import adamw_kernel
from trainer.optimizer import build_optimizer

Parameters = dict[str, torch.nn.Parameter]


def rows(parameters: Parameters) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured. An optimizer is gone before the next one is made."""
    weights = list(parameters.values())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    scale = torch.tensor(2.0, device=weights[0].device)
    yield "torch: norm of the gradients", lambda: torch.nn.utils.get_total_norm(gradients)
    yield "torch: clip_grad_norm_, norm and scaling", lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)
    torchs = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    yield "torch: fused AdamW", torchs.step
    torchs.grad_scale = scale  # type: ignore[attr-defined]  # as its GradScaler sets it
    yield "torch: fused AdamW, gradients divided by a scale", torchs.step
    del torchs
    settings: dict[str, dict[str, Any]] = {
        "AdamW": {},
        "AdamW, rounded by chance": {"rounding_seed": 1},
        "adamw8bit": {"name": "adamw8bit"},
        "adamw8bit, compiled": {"name": "adamw8bit", "compiled": True},
    }
    for name, chosen in settings.items():
        ours = build_optimizer(parameters, 1e-5, 0.1, **chosen)
        ours.grad_scale = scale  # type: ignore[attr-defined]
        yield f"trainer: {name}, gradients divided by a scale", ours.step
        del ours
    serves, adamw_kernel.serves = adamw_kernel.serves, lambda _: False
    ours = build_optimizer(parameters, 1e-5, 0.1, rounding_seed=1)
    yield "trainer: AdamW, rounded by chance, without the kernel", ours.step
    adamw_kernel.serves = serves


def make_parameters(shape: str, device: str) -> Parameters:
    """Random weights of the shape in bf16, with gradients."""
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**steps.SHAPES[shape])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made = {name: torch.nn.Parameter(torch.empty_like(p, device=device)) for name, p in model.named_parameters()}
    for parameter in made.values():
        parameter.data.normal_(0, 0.02)
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def timed(call: Callable[[], Any], device: str, rounds: int) -> tuple[float, float]:
    """Milliseconds of a call until it is done, and until it returns; medians."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    done, returned = [], []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        call()
        returned.append(time.perf_counter() - began)
        wait()
        done.append(time.perf_counter() - began)
    return statistics.median(done) * 1000, statistics.median(returned) * 1000


@click.command()
@click.option("--shape", type=click.Choice(list(steps.SHAPES)), default="8b", show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=steps.RESULTS)
def main(shape: str, device: str, rounds: int, results: Path) -> None:
    """Measure every row in this process."""
    found = []
    for name, call in rows(make_parameters(shape, device)):
        done, host = timed(call, device, rounds)
        found.append({"row": name, "milliseconds": round(done, 2), "host_milliseconds": round(host, 2)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [f"Llama, shape {shape}, bf16, {where}, torch {torch.__version__}; medians of {rounds}", ""]
    lines += ["| | ms | of them on the host |", "|---|---|---|"]
    lines += [f"| {row['row']} | {row['milliseconds']} | {row['host_milliseconds']} |" for row in found]
    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"optimizer-{shape}"
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
