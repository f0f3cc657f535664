"""Write docs/reference/cli.md from the commands themselves: `make docs`. A test holds that the page is current."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from ckptool.cli.main import EPILOG, cli
from trainer.cli import command as trainer

PAGE = Path(__file__).with_name("cli.md")


def render() -> str:
    """The whole page as Markdown."""
    parts = [
        "# Command line",
        "<!-- Written by generate_cli.py; change the command's help instead. -->",
        description(cli),
    ]
    for name in sorted(cli.commands):
        command = cli.commands[name]
        subcommands = command.commands if isinstance(command, click.Group) else {}
        parts += command_section(f"ckptool {name}", command)
        for subname in sorted(subcommands):
            parts += command_section(f"ckptool {name} {subname}", subcommands[subname])
    parts += ["## Exit codes", EPILOG.removeprefix("Exit codes: ").capitalize()]
    parts += command_section("python -m trainer", trainer)
    return "\n\n".join(parts) + "\n"


def command_section(title: str, command: click.Command) -> Iterator[str]:
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join([title, "[OPTIONS]", *(usage_of(argument) for argument in arguments)])
    yield f"## {title}"
    yield f"```text\n{usage.strip()}\n```"
    yield description(command)
    rows = [row(param) for param in command.params if isinstance(param, click.Option)]
    if rows:
        yield "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def description(command: click.Command) -> str:
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def usage_of(argument: click.Argument) -> str:
    """`NAME`, or `[NAME]` when it may be left out."""
    name = str(argument.name).upper() if argument.metavar is None else argument.metavar
    return name if argument.required or not name else f"[{name}]"


def row(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {value_name(option)}"
    meaning = (option.help or "") + (f" Environment: {option.envvar}." if option.envvar else "")
    return f"| `{names}{value}` | {meaning} | {default_of(option)} |".replace("\n", " ")


def default_of(option: click.Option) -> str:
    """As it is shown in `--help`; of an option that can be switched on and off, the name of what it is by itself."""
    if option.secondary_opts:
        names = option.opts if option.default else option.secondary_opts
        return f"`{names[0]}`"
    has_default = option.show_default and not option.is_flag and isinstance(option.default, (str, int, float, Path))
    return str(option.default) if has_default else ""


def value_name(option: click.Option) -> str:
    if option.metavar:
        return option.metavar.replace("|", "\\|")
    if isinstance(option.type, click.Choice):
        return "\\|".join(option.type.choices)
    if isinstance(option.type, click.Path):
        return "PATH"
    return option.type.name.split()[0].upper()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
