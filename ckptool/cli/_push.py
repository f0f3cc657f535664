"""The options of a push to the Hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def push_options(command: Command) -> Command:
    """Add `--branch`, `--private` and `--commit-message`."""
    branch = click.option(
        "--branch", default="main", show_default=True, help="The branch that gets the commit; made if it is not there."
    )
    private = click.option("--private", is_flag=True, help="A repository that is made is private.")
    message = click.option("--commit-message", default="", metavar="TEXT", help="The commit's message.")
    return branch(private(message(command)))
