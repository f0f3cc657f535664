"""One table: what each kind of exception prints, and the exit code it means."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass

import click

from ckptool.cli._conversion import is_other_rank
from ckptool.cli._output import show_error
from ckptool.core.text import one_line
from ckptool.errors import CkptoolError
from ckptool.storage.files import explain_os_error

DEBUG_VARIABLE = "CKPTOOL_DEBUG"
INTERRUPTED = 130


@dataclass(frozen=True)
class _Said:
    """An error in words. `lines` are for a person; None where click shows its own, with the usage."""

    kind: str
    message: str
    exit_code: int
    hint: str = ""
    lines: tuple[str, ...] | None = None


def report(error: BaseException, as_json: bool = False) -> int:
    """Print the error for a person, on stderr, and return its exit code. CKPTOOL_DEBUG=1 shows the traceback as well.

    `as_json` prints it as an object on stdout too, where a program waits for the result.
    """
    if isinstance(error, BrokenPipeError):
        return _close_stdout_quietly()
    if _was_interrupted(error):
        error = KeyboardInterrupt()
    if isinstance(error, OSError):
        error = _keep_cause(explain_os_error(error, error.filename or "standard output"), error)
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    said = _describe(error)
    if isinstance(error, CkptoolError) and error.is_shared and is_other_rank():
        return said.exit_code  # rank 0 says it
    if isinstance(error, click.ClickException):
        error.show()
    for line in said.lines or ():
        click.echo(line, err=True)
    if as_json:
        with contextlib.suppress(OSError):  # what is wrong may be standard output itself
            show_error(said.kind, said.message, said.hint, said.exit_code)
    return said.exit_code


def _describe(error: BaseException) -> _Said:
    kind = type(error).__name__
    match error:
        case CkptoolError():
            message, hint = one_line(str(error)), one_line(error.hint)
            lines = (f"error: {message}", *([f"hint: {hint}"] if hint else []))
            return _Said(kind, message, error.exit_code, hint, lines)
        case click.ClickException():
            return _Said(kind, one_line(error.format_message()), error.exit_code)
        case KeyboardInterrupt() | click.Abort():
            return _Said("Interrupted", "interrupted", INTERRUPTED, lines=("interrupted",))
        case MemoryError():
            return _Said(kind, "out of memory", 1, lines=("error: out of memory",))
        case _:
            message = one_line(f"{kind}: {error}")
            hint = f"set {DEBUG_VARIABLE}=1 for the traceback"
            return _Said("InternalError", message, 1, hint, (f"internal error: {message}; {hint}",))


def _was_interrupted(error: BaseException | None) -> bool:
    """True when Ctrl-C is at the bottom of it: libraries make an ImportError of one that meets them while they load."""
    while isinstance(error, ImportError):
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


def _keep_cause(error: CkptoolError, cause: OSError) -> CkptoolError:
    error.__cause__ = cause
    return error


def _close_stdout_quietly() -> int:
    """The reader of a pipe went away (`ckptool ls | head`). Keep the interpreter from complaining when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
