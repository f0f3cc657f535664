"""`ckptool report NAME|ROOT`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._options import (
    complete_path,
    name_argument,
    output_options,
    overwrite_option,
    root_option,
    work_dir_option,
)
from ckptool.cli._output import line, show, size
from ckptool.cli._progress import counter_on_stderr
from ckptool.core.plan import Result
from ckptool.storage.files import Place


@click.command("report", short_help="Write one page of charts about a run and a checkpoint.")
@name_argument
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The HTML file to write.",
)
@click.option(
    "--against",
    metavar="OTHER",
    shell_complete=complete_path,
    help="Show the change against another checkpoint or Hugging Face folder.",
)
@click.option("--keys", metavar="GLOB", default="*", help="Read the values, and list the parts, of these tensors only.")
@click.option(
    "--level",
    type=click.Choice(["structure", "bytes", "content"]),
    default="structure",
    show_default=True,
    help="How much to verify: see ckptool verify.",
)
@click.option("--values/--no-values", default=True, show_default=True, help="Read the tensors for their statistics.")
@overwrite_option
@root_option
@work_dir_option
@output_options
def command(
    *,
    name: str,
    out: Path,
    against: str | None,
    keys: str,
    level: str,
    values: bool,
    overwrite: bool,
    root: Place | None,
    work_dir: Place | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a page that opens in any browser, offline: timeline, shard map, sizes, values, change, what verify finds.

    NAME is a run's root (its latest checkpoint is shown), a checkpoint (a path, a name under the root, "latest"), or a
    Hugging Face folder. Everything is in the one file.
    """
    from ckptool.ops.report import report

    with counter_on_stderr(quiet or as_json) as progress:
        result = report(
            name,
            out=out,
            against=against,
            root=root,
            work_dir=work_dir,
            keys=keys,
            level=level,
            values=values,
            overwrite=overwrite,
            progress=progress,
        )
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def _show(result: Result) -> None:
    facts = result.details
    line(f"wrote {result.target} ({size(facts['page_bytes'])}, {result.seconds:.1f} s)")
    if facts["num_findings"]:
        line(f"verify found {facts['num_findings']} things that are wrong; the page lists them")
