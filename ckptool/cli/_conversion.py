"""What import-hf, export and reshard have in common on the command line: options, progress, torchrun, the result."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from ckptool.cli._options import Size, dry_run_option, output_options, overwrite_option
from ckptool.cli._output import line, show, show_plan, size
from ckptool.cli._progress import progress_on_stderr
from ckptool.core.plan import Result

Command = TypeVar("Command", bound=Callable[..., Any])

_FIELDS = ("overwrite", "resume", "dry_run", "num_workers", "memory_bytes", "as_json", "quiet")


@dataclass(frozen=True)
class Conversion:
    """The values of the shared options."""

    overwrite: bool
    resume: bool
    dry_run: bool
    num_workers: int | None
    memory_bytes: int | None
    as_json: bool
    quiet: bool

    @contextlib.contextmanager
    def arguments(self) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments that the operations take for them."""
        with ranks_of_torchrun() as ranks, progress_on_stderr(self.quiet or is_other_rank()) as progress:
            yield {
                "overwrite": self.overwrite,
                "resume": self.resume,
                "dry_run": self.dry_run,
                "num_workers": self.num_workers,
                "memory_bytes": self.memory_bytes,
                "ranks": ranks,
                "progress": progress,
            }

    def show(self, result: Result, done: str, how: str = "") -> None:
        """Print a result; `done` says what was done to the target, `how` stands for its size and time."""

        def human(result: Result) -> None:
            if result.plan is not None and not result.executed:
                show_plan(result.plan)
                return
            written = f"{size(result.plan.write_bytes)} in {result.seconds:.1f} s" if result.plan else ""
            line(f"{done} ({how or written})" if how or written else done)

        if not is_other_rank():
            show(result, as_json=self.as_json, quiet=self.quiet, human=human, bare=[result.target])


def conversion_options(command: Command) -> Command:
    """Add the shared options; the command gets them as one argument, `conversion`."""

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        shared = {name: values.pop(name) for name in _FIELDS}
        return command(**values, conversion=Conversion(**shared))

    options = (
        overwrite_option,
        click.option(
            "--resume/--no-resume",
            default=True,
            show_default=True,
            help="Go on from what an interrupted attempt at the same work has finished, or start over.",
        ),
        dry_run_option,
        click.option(
            "--workers",
            "num_workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Files written at the same time.  [default: one a core, as many as --memory allows]",
        ),
        click.option(
            "--memory",
            "memory_bytes",
            type=Size(),
            metavar="SIZE",
            help="What the buffers may take together.  [default: 192MiB]",
        ),
        output_options,
    )
    for option in reversed(options):
        collected = option(collected)
    return collected  # type: ignore[return-value]


@contextlib.contextmanager
def ranks_of_torchrun() -> Iterator[Any]:
    """Yield the processes that torchrun started this command as; None for a command of its own."""
    if not is_torchruns_own():
        yield None
        return
    from ckptool.ranks import joined_ranks

    with joined_ranks() as ranks:
        yield ranks


@functools.cache
def is_torchruns_own() -> bool:
    """True for one of several processes that torchrun itself started.

    A program that a training rank starts has that rank's environment, too, and would wait for others for ever.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # no /proc here
        return "TORCHELASTIC_RUN_ID" in os.environ
    launchers = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
    return any(os.path.basename(word) in launchers for word in words)


def is_other_rank() -> bool:
    """True in a process of torchrun that leaves talking to rank 0."""
    return is_torchruns_own() and int(os.environ.get("RANK", "0")) > 0
