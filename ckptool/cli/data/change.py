"""`ckptool data seek | skip | edit`: they replace the data items of a checkpoint, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ckptool.cli._options import dry_run_option, name_argument, output_options, root_option
from ckptool.cli._output import line, show
from ckptool.core.data_source import DataSource
from ckptool.core.plan import Result
from ckptool.core.position import DataPosition
from ckptool.errors import UsageError
from ckptool.storage.files import Place

reason_option = click.option("--reason", default="", metavar="TEXT", help="Why; the checkpoint keeps it.")


class Weights(click.ParamType):
    """Shares by source name: `a=.7,b=.3`."""

    name = "weights"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        weights: dict[str, float] = {}
        for part in value.split(","):
            name, equals, number = part.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                equals = ""
                weight = 0.0
            if not (name and equals) or name in weights:
                self.fail(f"{value!r} is no list of weights. Write NAME=NUMBER,NAME=NUMBER.", param, ctx)
            weights[name.strip()] = weight
        return weights


@click.command("seek", short_help="Let training go on at another place of its data.")
@name_argument
@click.option("--to", required=True, metavar="PLACE", help="unit:N, step:N, token:N, epoch:K, +N or -N.")
@reason_option
@root_option
@dry_run_option
@output_options
def seek_command(
    *, name: str, to: str, reason: str, root: Place | None, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Let training from checkpoint NAME go on at another place of its data; says what repeats and what is skipped.

    unit:N is the unit that was or would be the N-th, from 0; step:N the first unit after N steps; token:N the one that
    holds that token; epoch:K the first of epoch K, from 0; +N and -N are units from here. The weights and all other
    files stay as they are, byte for byte.
    """
    from ckptool.ops.data_edit import seek

    result = seek(name, to, root=root, reason=reason, dry_run=dry_run)
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


@click.command("skip", short_help="Leave out a range of the data that is still ahead.")
@name_argument
@click.argument("units", metavar="RANGE")
@reason_option
@root_option
@dry_run_option
@output_options
def skip_command(
    *, name: str, units: str, reason: str, root: Place | None, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Leave out RANGE when training goes on from checkpoint NAME: unit:A..B or step:A..B; B is not left out.

    To train past a spike of the loss: resume from a checkpoint before it, and skip its steps.
    """
    from ckptool.ops.data_edit import skip

    result = skip(name, units, root=root, reason=reason, dry_run=dry_run)
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


@click.command("edit", short_help="Other weights, or other sources, from here on.")
@name_argument
@click.option("--weights", type=Weights(), metavar="A=.7,B=.3", help="Shares of all sources that are to be trained.")
@click.option(
    "--add-source",
    "source_files",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A data_position.json of a run on it; or JSON of a source: name, num_units, fingerprint, and unit_kind if it "
    "is not window. --weights must name it.",
)
@reason_option
@root_option
@dry_run_option
@output_options
def edit_command(
    *,
    name: str,
    weights: dict[str, float] | None,
    source_files: tuple[Path, ...],
    reason: str,
    root: Place | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Change the mixture that training from checkpoint NAME goes on with. Each source goes on where it stands.

    The trainer must then be given the same mixture: it compares.
    """
    from ckptool.ops.data_edit import edit

    sources = tuple(source for path in source_files for source in read_sources(path))
    result = edit(name, weights=weights, add_sources=sources, root=root, reason=reason, dry_run=dry_run)
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def read_sources(path: Path) -> list[DataSource]:
    """The source that a JSON file describes, or those of a checkpoint's `data_position.json`, as they are now."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and "segments" in record:
            return list(DataPosition.from_json(json.dumps(record), str(path)).segment.sources)
        return [DataSource.from_record(record)]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} describes no source: {error}") from error


def _show(result: Result) -> None:
    for change in result.details["changes"]:
        line(change)
    line(f"{result.target} {'is changed' if result.executed else 'is not changed: this was a dry run'}")
