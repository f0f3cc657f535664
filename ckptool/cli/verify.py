"""`ckptool verify NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptool.cli._options import complete_path, name_argument, output_options, root_option
from ckptool.cli._output import line, message, show, size
from ckptool.cli._progress import counter_on_stderr
from ckptool.core.text import counted
from ckptool.storage.files import Place

if TYPE_CHECKING:
    from ckptool.ops.verify import Verification

#: Findings that are shown; the rest are in the JSON.
SHOWN_FINDINGS = 20
SHOWN_STEPS = 3


@click.command("verify", short_help="Check that a checkpoint is whole and unchanged.")
@name_argument
@click.option(
    "--level",
    type=click.Choice(["structure", "bytes", "content"]),
    default="bytes",
    show_default=True,
    help="structure: metadata, files and sizes, in under a second. bytes: every byte of every file. "
    "content: every tensor's digest as well.",
)
@click.option(
    "--against",
    metavar="SRC",
    shell_complete=complete_path,
    help="Compare bit for bit with another checkpoint or Hugging Face folder, in any sharding.",
)
@click.option("--finite", is_flag=True, help="Count NaN and infinite numbers in every tensor.")
@click.option(
    "--subset", metavar="K/N", default="1/1", show_default=True, help="Read the K-th of N parts only (level bytes)."
)
@root_option
@output_options
def command(
    *,
    name: str,
    level: str,
    against: str | None,
    finite: bool,
    subset: str,
    root: Place | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check that a checkpoint is whole, unchanged since it was written, and (if asked) equal to another.

    NAME is a path, a name under the root (step-5000), "latest", or a Hugging Face folder. Checkpoints by other programs
    are checked by the checksums that torch put into them. Ends with 4 when anything is damaged, 3 when
    anything differs.
    """
    from ckptool.ops.verify import verify

    with counter_on_stderr(quiet or as_json) as progress:
        result = verify(name, root=root, level=level, against=against, finite=finite, subset=subset, progress=progress)
    bare = [finding.file or finding.tensor for finding in result.findings]
    show(result, as_json=as_json, quiet=quiet, human=lambda _: _show(result), bare=bare)
    return result.exit_code


def _show(result: Verification) -> None:
    shown = result.findings[:SHOWN_FINDINGS]
    for finding in shown:
        line(f"{finding.kind}: {finding.message}")
    if len(result.findings) > SHOWN_FINDINGS:
        message(f"... {len(result.findings) - SHOWN_FINDINGS} more; --json has them all")
    if not result.findings:
        line(f"{result.target} is good: {_what_was_checked(result)}")
        return
    line(f"{result.target} is not good: {counted(len(result.findings), 'finding')}")
    steps = list(dict.fromkeys(finding.next_step for finding in shown if finding.next_step))
    for step in steps[:SHOWN_STEPS]:
        message(f"next: {step}")
    if len(steps) > SHOWN_STEPS:
        message("... and so on for the others")


def _what_was_checked(result: Verification) -> str:
    facts = result.details
    part = "" if facts["subset"] == "1/1" else f", part {facts['subset']}"
    counts = f"{facts['num_files']} files, {facts['num_tensors']} tensors"
    if not facts["num_bytes"]:
        return f"{facts['level']} of {counts} checked in {result.seconds:.1f} s"
    rate = size(int(facts["num_bytes"] / max(result.seconds, 1e-9)))
    return (
        f"{facts['level']} of {counts}{part} checked, "
        f"{size(facts['num_bytes'])} read in {result.seconds:.1f} s ({rate}/s)"
    )
