"""`ckptool pin NAME`."""

from __future__ import annotations

import click

from ckptool.cli._options import name_argument, output_options, root_option
from ckptool.cli._output import line, show
from ckptool.core.plan import Result
from ckptool.storage.files import Place


@click.command("pin", short_help="Mark a checkpoint as one that is never pruned.")
@name_argument
@click.option("--reason", default="", metavar="TEXT", help="Why it is to stay; `ls` and `prune` show it.")
@click.option("--remove", is_flag=True, help="Take the pin away.")
@root_option
@output_options
def command(*, name: str, reason: str, remove: bool, root: Place | None, as_json: bool, quiet: bool) -> None:
    """Mark a checkpoint as one that `prune` and the trainer's retention leave alone.

    The mark is a file under .pins in the folder that holds the checkpoint; the checkpoint itself is not touched.
    """
    from ckptool.ops.pin import pin

    result = pin(name, root=root, reason=reason, remove=remove)
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.details["name"]])


def _show(result: Result) -> None:
    line(f"{result.target} {'is pinned' if result.details['pinned'] else 'is no longer pinned'}")
