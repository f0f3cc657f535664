"""`ckptool export NAME --to FORM`."""

from __future__ import annotations

import click

from ckptool.cli._conversion import Conversion, conversion_options
from ckptool.cli._options import (
    PlaceParam,
    Size,
    dtype_option,
    name_argument,
    root_option,
)
from ckptool.cli._output import message
from ckptool.cli._push import push_options
from ckptool.naming.dialects import dialect_names
from ckptool.storage.files import Place


@click.command("export", short_help="Write a checkpoint as a Hugging Face folder, another trainer's or one .pt file.")
@name_argument
@click.option(
    "--to",
    type=click.Choice(["hf", "torch", *dialect_names()]),
    default="hf",
    show_default=True,
    help="hf: a folder that from_pretrained loads (model weights only). torch: one torch.save file with everything. "
    "Others: a DCP checkpoint of the model under that trainer's names.",
)
@click.option("--out", type=PlaceParam(), metavar="PATH", help="Where to write.")
@dtype_option
@click.option(
    "--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest safetensors file (with --to hf)."
)
@click.option(
    "--engine",
    type=click.Choice(["stream", "torch"]),
    default="stream",
    show_default=True,
    help="stream: never the whole model in memory. torch: torch's own dcp_to_torch_save, all in memory.",
)
@click.option(
    "--config",
    default="",
    metavar="HF",
    help="Hugging Face folder or Hub id whose config and tokenizer to take, where the checkpoint has none.",
)
@click.option("--adapter", is_flag=True, help="Only the LoRA adapter that the checkpoint holds, as a folder for peft.")
@click.option("--merge-adapter", is_flag=True, help="The model with the checkpoint's LoRA adapter in its weights.")
@click.option("--base", default="", metavar="NAME", help="The adapter's base (default: what it was trained on).")
@click.option("--lora-alpha", type=float, help="The adapter's alpha, where the checkpoint doesn't say it.")
@root_option
@click.option(
    "--untie", is_flag=True, help="Tied tensors are written under each of their names, and the config says so."
)
@click.option("--keys", multiple=True, metavar="GLOB", help="Only tensors whose name in the checkpoint matches.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Without tensors whose name in the checkpoint matches.")
@click.option(
    "--push",
    default="",
    metavar="REPO",
    help="Push it to USER/NAME on the Hugging Face Hub as well, with a card that says where the weights come from.",
)
@push_options
@conversion_options
def command(
    *,
    name: str,
    to: str,
    out: Place | None,
    dtype: str,
    max_shard_size: int,
    engine: str,
    config: str,
    adapter: bool,
    merge_adapter: bool,
    base: str,
    lora_alpha: float | None,
    untie: bool,
    keys: tuple[str, ...],
    exclude: tuple[str, ...],
    push: str,
    branch: str,
    private: bool,
    commit_message: str,
    root: Place | None,
    conversion: Conversion,
) -> None:
    """Write a checkpoint of any trainer as a Hugging Face folder, as another trainer's, or as one .pt file.

    NAME is a path, a name under the root (step-5000), or "latest".
    """
    from ckptool.ops.export import export
    from ckptool.ops.push import PushTarget

    if adapter and merge_adapter:
        raise click.UsageError("--adapter and --merge-adapter exclude each other")
    with conversion.arguments() as arguments:
        result = export(
            name,
            to=to,
            out=out,
            dtype=dtype,
            max_shard_bytes=max_shard_size,
            engine=engine,
            config=config,
            adapter="merge" if merge_adapter else "folder" if adapter else "",
            base=base,
            lora_alpha=lora_alpha,
            untie=untie,
            keys=keys,
            exclude=exclude,
            push=PushTarget(push, branch, private, commit_message) if push else None,
            root=root,
            **arguments,
        )
    pushed = result.details.get("push")
    if pushed and not result.executed and not conversion.quiet and not conversion.as_json:
        message(f"note: {pushed['plan']}")
    conversion.show(result, f"exported to {result.target}" + (f", pushed to {pushed['url']}" if pushed else ""))
