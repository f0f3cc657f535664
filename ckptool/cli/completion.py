"""`ckptool completion bash|zsh|fish`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ckptool.errors import UnsupportedError


@click.command("completion", short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    Bash: put `eval "$(ckptool completion bash)"` into ~/.bashrc. Zsh: the same with zsh, into ~/.zshrc.
    Fish: `ckptool completion fish > ~/.config/fish/completions/ckptool.fish`.
    """
    script_class = get_completion_class(shell)
    if script_class is None:
        raise UnsupportedError(f"this version of click has no completion for {shell}")
    click.echo(script_class(ctx.find_root().command, {}, "ckptool", "_CKPTOOL_COMPLETE").source())
