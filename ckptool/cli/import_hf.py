"""`ckptool import-hf SRC [NAME]`."""

from __future__ import annotations

import click

from ckptool.cli._conversion import Conversion, conversion_options
from ckptool.cli._options import (
    Size,
    complete_path,
    dtype_option,
    root_option,
)
from ckptool.storage.files import Place


@click.command("import-hf", short_help="Turn a Hugging Face model into a distributed checkpoint.")
@click.argument("src", shell_complete=complete_path)
@click.argument("name", required=False)
@root_option
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the Hub.")
@click.option(
    "--local-cache",
    is_flag=True,
    help="Download the model to the Hub's cache first; else its weights are read from the Hub as they are needed.",
)
@dtype_option
@click.option(
    "--adapter", default="", metavar="PEFT", help="Folder or Hub id of a LoRA adapter for SRC, kept beside it."
)
@click.option(
    "--chunk-size", type=Size(), default="32MiB", show_default=True, help="Largest piece of a tensor stored as one."
)
@click.option(
    "--engine",
    type=click.Choice(["stream", "transformers"]),
    default="stream",
    show_default=True,
    help="stream: never the whole model in memory. transformers: from_pretrained on the CPU, then save.",
)
@click.option("--untie", is_flag=True, help="Tied tensors are stored apart in the checkpoint, and the config says so.")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only tensors whose name in the checkpoint matches.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Without tensors whose name in the checkpoint matches.")
@click.option(
    "--consume",
    is_flag=True,
    help="Delete each file of SRC once its bytes are safe in the checkpoint, for disks that can't hold both.",
)
@conversion_options
def command(
    *,
    src: str,
    name: str | None,
    root: Place | None,
    revision: str | None,
    local_cache: bool,
    dtype: str,
    adapter: str,
    chunk_size: int,
    engine: str,
    untie: bool,
    keys: tuple[str, ...],
    exclude: tuple[str, ...],
    consume: bool,
    conversion: Conversion,
) -> None:
    """Turn a Hugging Face model into a distributed checkpoint.

    SRC is a Hub id (meta-llama/Llama-3.1-8B), a local folder or a single file. The checkpoint is written to NAME under
    the root; NAME defaults to the last part of SRC.
    """
    from ckptool.ops.import_hf import import_hf

    with conversion.arguments() as arguments:
        result = import_hf(
            src,
            name,
            root=root,
            revision=revision,
            local_cache=local_cache,
            dtype=dtype,
            adapter=adapter,
            chunk_bytes=chunk_size,
            engine=engine,
            untie=untie,
            keys=keys,
            exclude=exclude,
            consume=consume,
            **arguments,
        )
    conversion.show(result, f"imported to {result.target}")
