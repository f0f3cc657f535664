"""`ckptool estimate SRC`."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli._options import Size, complete_name, output_options, root_option
from ckptool.cli._output import line, show, size, table
from ckptool.core.plan import Result
from ckptool.storage.files import Place

_POSITIVE = click.IntRange(min=1)
_DTYPE = click.Choice(["fp32", "bf16"])
_NAMES = {"ddp": "DDP", "fsdp2": "FSDP2"}
_CHECKPOINTING = {"none": "", "selective": ", selective checkpointing", "block": ", checkpointing"}
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "peak", "needed")


@click.command("estimate", short_help="Whether training fits into GPUs, told from the config.")
@click.argument("src", shell_complete=complete_name)
@click.option("--gpus", "num_gpus", type=_POSITIVE, default=1, show_default=True, metavar="N", help="GPUs in all.")
@click.option("--gpu-memory", "gpu_bytes", type=Size(), default="80GB", show_default=True, help="Memory of each GPU.")
@click.option("--seq-len", type=_POSITIVE, default=1024, show_default=True, help="Tokens in a sequence.")
@click.option(
    "--micro-batch-size", type=_POSITIVE, default=1, show_default=True, help="Sequences in a forward pass of one GPU."
)
@click.option(
    "--global-batch-size",
    type=_POSITIVE,
    help="Sequences in a step over all GPUs; where a GPU's share is several micro batches, their gradients are "
    "accumulated unsharded. Default: one micro batch a GPU.",
)
@click.option(
    "--dp-replicate", type=_POSITIVE, default=1, show_default=True, help="Copies of the sharded model (HSDP)."
)
@click.option("--tp", type=_POSITIVE, default=1, show_default=True, help="GPUs that split each layer among them.")
@click.option("--param-dtype", type=_DTYPE, default="fp32", show_default=True, help="Dtype of the trained weights.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adamw8bit"]),
    default="adamw",
    show_default=True,
    help="adamw8bit: moments in 8 bits.",
)
@click.option("--optimizer-dtype", type=_DTYPE, help="Dtype of AdamW's state (default: the weights', as the trainer).")
@click.option("--compute-dtype", type=_DTYPE, default="bf16", show_default=True, help="Dtype of the computation.")
@click.option(
    "--loss",
    type=click.Choice(["chunked", "plain"]),
    default="chunked",
    show_default=True,
    help="Logits some tokens at a time, or all at once.",
)
@click.option("--compile", "compiled", is_flag=True, help="Blocks are compiled, which keeps fewer activations.")
@click.option(
    "--reshard-after-forward/--no-reshard-after-forward",
    default=True,
    show_default=True,
    help="Gathered weights of a block are given back after its forward pass, or stay until its backward pass.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@root_option
@output_options
def command(*, src: str, root: Place | None, as_json: bool, quiet: bool, **setting: Any) -> None:
    """Say how much GPU memory training the model SRC takes, and whether it fits.

    SRC is a checkpoint (a path, a name under the root, or `latest`), a folder with a config.json, or a Hub id, of which
    only the config is fetched. It is about `python -m trainer` with the options of the same names, and for comparison
    about DDP. Parts are each at its own largest; they are not all there at the same time, so the peak is less than
    their sum. --quiet prints the ways that fit.
    """
    from ckptool.ops.estimate import estimate

    result = estimate(src, root=root, **setting)
    fitting = [_name(way) for way in result.details["ways"] if way["fits"]]
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=fitting)


def _show(result: Result) -> None:
    details = result.details
    line(f"{details['num_parameters']:,} parameters, {details['num_blocks']} blocks")
    line(f"on each of {details['num_gpus']} GPUs of {size(details['gpu_bytes'])}:")
    rows = [
        (
            _name(way),
            *(size(way[f"{column}_bytes"]) for column in _COLUMNS),
            "yes" if way["fits"] else "no",
            str(way["fewest_gpus"] or "none"),
        )
        for way in details["ways"]
    ]
    numbers = (*_COLUMNS, "from GPUs")
    table(("", *_COLUMNS, "fits", "from GPUs"), rows, right=numbers)
    best = next((way for way in reversed(details["ways"]) if way["fits"]), None)
    if best is None:
        line(f"nothing fits; {_ways_out(details)}")


def _name(way: dict[str, Any]) -> str:
    return _NAMES[way["sharding"]] + _CHECKPOINTING[way["checkpointing"]]


def _ways_out(details: Any) -> str:
    fewest = [way["fewest_gpus"] for way in details["ways"] if way["fewest_gpus"]]
    if fewest:
        return f"from {min(fewest)} GPUs on it does"
    return "no number of GPUs helps: shorten --seq-len, lower --micro-batch-size, or raise --tp"
