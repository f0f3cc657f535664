"""The `ckptool` command: the group, its version, and the one place where errors become exit codes.

No module of this package imports torch, rich or the library's working parts at its top: `--help` must stay quick.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

import click

from ckptool import __version__
from ckptool.cli import (
    completion,
    copy,
    data,
    diff,
    estimate,
    export,
    import_hf,
    inspect,
    ls,
    pin,
    plan,
    prune,
    push,
    report,
    reshard,
    top,
    verify,
)
from ckptool.cli._errors import report as report_error
from ckptool.core.interruption import listening

EPILOG = (
    "Exit codes: 0 ok, 1 error, 2 usage, 3 mismatch, 4 damaged input, 5 unsafe content, 6 target exists, "
    "130 interrupted."
)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ckptool", message="%(prog)s %(version)s")
def cli() -> None:
    """Convert, inspect and export PyTorch distributed checkpoints (DCP).

    A checkpoint NAME is a path, a name under the root (step-5000), or "latest".
    """


for command in (
    import_hf.command,
    export.command,
    push.command,
    reshard.command,
    plan.command,
    estimate.command,
    ls.command,
    inspect.command,
    verify.command,
    diff.command,
    report.command,
    top.command,
    data.command,
    prune.command,
    pin.command,
    copy.command,
    completion.command,
):
    cli.add_command(command)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's arguments) and return its exit code. Errors go to stderr."""
    try:
        with listening():
            code = cli.main(args=args, prog_name="ckptool", standalone_mode=False)
            sys.stdout.flush()
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        return report_error(error, as_json=_wants_json(sys.argv[1:] if args is None else args))
    return code if isinstance(code, int) else 0


def _wants_json(args: Sequence[str]) -> bool:
    """Told from the words typed: when they are wrong, there is no parsed option to ask."""
    options = args[: args.index("--")] if "--" in args else args
    return "--json" in options


def main() -> None:
    """The console script."""
    # Loading libraries makes many objects and hardly any cycles among them; looking for some is a sixth of the time.
    gc.set_threshold(200_000, 20, 100)
    # numpy's BLAS, which no command uses, starts threads that spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # transformers imports torchao where it is installed, which warns of kernels that it can't load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    code = run()
    gc.freeze()  # or the interpreter goes through all of it once more before it ends, for a second
    sys.exit(code)
