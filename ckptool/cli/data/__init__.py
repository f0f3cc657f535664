"""`ckptool data ...`: where training stands in its data, and how to change that."""

from __future__ import annotations

import click

from ckptool.cli.data import change, foreign, look


@click.group("data", short_help="Show, check and change where training stands in its data.")
def command() -> None:
    """Show, check and change where training stands in its data.

    A data position is one integer over a pure order of units, so it means the same on any number of ranks.
    """


for subcommand in (
    look.show_command,
    look.verify_command,
    look.diff_command,
    look.plan_command,
    change.seek_command,
    change.skip_command,
    change.edit_command,
    foreign.import_command,
):
    command.add_command(subcommand)
