"""The options and arguments that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ckptool.core.dtypes import DTYPE_OPTIONS
from ckptool.errors import UsageError
from ckptool.storage.files import Place

Command = TypeVar("Command", bound=Callable[..., Any])

_UNIT_BYTES = {
    **{"": 1, "B": 1},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_UNITS_IGNORING_CASE = {unit.lower(): num_bytes for unit, num_bytes in _UNIT_BYTES.items()}


class PlaceParam(click.ParamType):
    """A local path or a URL; ~ stands for the home folder."""

    name = "path or URL"

    def __init__(self, is_folder: bool = False) -> None:
        self._is_folder = is_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        from ckptool.storage.place import place

        found = place(value)
        if self._is_folder and isinstance(found, Path) and found.is_file():
            self.fail(f"{found} is a file, not a folder.", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class Size(click.ParamType):
    """A number of bytes: `32MiB` is 32 * 2**20, `5GB` is 5 * 10**9, a plain number is bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        unit_bytes = _UNITS_IGNORING_CASE.get(match[2].lower()) if match else None
        if match is None or unit_bytes is None:
            self.fail(f"{value!r} is not a size. Write a number and a unit, like 32MiB or 5GB.", param, ctx)
        num_bytes = int(float(match[1]) * unit_bytes)
        if num_bytes < 1:
            self.fail(f"{value!r} is less than one byte.", param, ctx)
        return num_bytes


class Rate(Size):
    """Bytes a second: `100MB/s`; the `/s` may be left out."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return super().convert(re.sub(r"\s*/\s*s\s*$", "", value) if isinstance(value, str) else value, param, ctx)


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of a checkpoint NAME: the checkpoints under the root, `latest`, or any folder."""
    from ckptool.runs import default_root

    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]
    root = ctx.params.get("root") or default_root()
    try:
        names = sorted(entry.name for entry in root.iterdir() if (entry / ".metadata").exists())
    except OSError:
        names = []
    return [CompletionItem(name) for name in ["latest", *names] if name.startswith(incomplete)]


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of a path, left to the shell."""
    return [CompletionItem(incomplete, type="file")]


name_argument = click.argument("name", shell_complete=complete_name)

root_option = click.option(
    "--root",
    type=PlaceParam(is_folder=True),
    envvar="CKPTOOL_ROOT",
    show_envvar=True,
    help="The folder that holds the checkpoints (default ./ckpt).",
)

_FOLDER = PlaceParam(is_folder=True)


def root_choices(command: Command) -> Command:
    """Add ROOT as an argument, and `--root` as another way to say it; `root_choice` tells which was meant."""
    option = click.option(
        "--root",
        "root_option",
        type=_FOLDER,
        envvar="CKPTOOL_ROOT",
        show_envvar=True,
        help="The same as the argument (default ./ckpt).",
    )
    return click.argument("root", type=_FOLDER, required=False)(option(command))


def root_choice(root: Place | None, root_option: Place | None) -> Place | None:
    """The root that was given; None for the default. Raises UsageError when it was given twice."""
    typed = click.get_current_context().get_parameter_source("root_option") is ParameterSource.COMMANDLINE
    if root is not None and typed:
        raise UsageError("the root is given twice, as an argument and as --root")
    return root or root_option


work_dir_option = click.option(
    "--work-dir",
    type=_FOLDER,
    help="Where metrics.jsonl is, if not in the root: the trainer's --work-dir.",
)

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["keep", *DTYPE_OPTIONS]),
    default="keep",
    show_default=True,
    help="Cast floating-point tensors; integers and booleans keep theirs.",
)

overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace what is there, at the moment when the new one is safe on the disk."
)

dry_run_option = click.option("--dry-run", is_flag=True, help="Print the plan and stop: nothing is written.")


def mesh_options(command: Command) -> Command:
    """Add `--world-size`, `--mesh` and `--placements`: the ranks that a checkpoint is to be read by."""
    world_size = click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="FSDP2 over N ranks.")
    mesh = click.option(
        "--mesh", metavar="AXIS=N,...", help="The same with more axes, outermost first: dp_replicate=2,dp_shard=4,tp=2."
    )
    placements = click.option(
        "--placements",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        metavar="FILE",
        help="A TOML file that says which dim each mesh axis cuts. Default: dim 0 for FSDP, transformers' plan for tp.",
    )
    return world_size(mesh(placements(command)))


def output_options(command: Command) -> Command:
    """Add `--json` and `--quiet`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    quiet = click.option("--quiet", "-q", is_flag=True, help="No progress or messages; print only paths or names.")
    return as_json(quiet(command))
