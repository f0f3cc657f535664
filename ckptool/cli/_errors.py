"""One table: what each kind of exception prints on stderr, and the exit code it means."""

from __future__ import annotations

import os
import sys
import traceback

import click

from ckptool.cli._conversion import is_other_rank
from ckptool.cli._output import one_line
from ckptool.errors import CkptoolError
from ckptool.storage.files import explain_os_error

DEBUG_VARIABLE = "CKPTOOL_DEBUG"
INTERRUPTED = 130


def report(error: BaseException) -> int:
    """Print the error for a person and return its exit code. CKPTOOL_DEBUG=1 shows the traceback as well."""
    if isinstance(error, BrokenPipeError):
        return _close_stdout_quietly()
    if isinstance(error, OSError):
        error = _keep_cause(explain_os_error(error, error.filename or "standard output"), error)
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    return _print_lines(error)


def _print_lines(error: BaseException) -> int:
    match error:
        case CkptoolError() if error.is_shared and is_other_rank():
            return error.exit_code  # rank 0 says it
        case CkptoolError():
            _say(f"error: {one_line(str(error))}")
            if error.hint:
                _say(f"hint: {one_line(error.hint)}")
            return error.exit_code
        case click.ClickException():
            error.show()
            return error.exit_code
        case KeyboardInterrupt() | click.Abort():
            _say("interrupted")
            return INTERRUPTED
        case MemoryError():
            _say("error: out of memory")
            return 1
        case _:
            detail = one_line(f"{type(error).__name__}: {error}")
            _say(f"internal error: {detail}; set {DEBUG_VARIABLE}=1 for the traceback")
            return 1


def _keep_cause(error: CkptoolError, cause: OSError) -> CkptoolError:
    error.__cause__ = cause
    return error


def _close_stdout_quietly() -> int:
    """The reader of a pipe went away (`ckptool ls | head`). Keep the interpreter from complaining when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _say(line: str) -> None:
    click.echo(line, err=True)
