"""`ckptool prune [ROOT]`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from ckptool.cli._options import dry_run_option, output_options, root_choice, root_choices, work_dir_option
from ckptool.cli._output import line, message, show, size
from ckptool.core.plan import Result
from ckptool.errors import UsageError
from ckptool.storage.files import Place

if TYPE_CHECKING:
    from ckptool.ops.prune import PrunePlan

_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Duration(click.ParamType):
    """A time span in seconds: `7d`, `12h`, `30min`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value)
        if match is None or match[2] not in _UNIT_SECONDS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time span. Write a number and s, min, h, d or w: 7d.", param, ctx)
        return float(match[1]) * _UNIT_SECONDS[match[2]]


@click.command("prune", short_help="Remove the checkpoints of a run that no rule keeps.")
@root_choices
@click.option("--keep-last", type=click.IntRange(1), metavar="K", default=None, help="Keep the newest K.")
@click.option(
    "--keep-every", type=click.IntRange(1), metavar="N", default=None, help="Keep those whose step is a multiple of N."
)
@click.option("--keep-within", type=Duration(), default=None, help="Keep those younger than this: 7d, 12h.")
@click.option(
    "--keep-best",
    type=(str, click.IntRange(1)),
    metavar="METRIC[:min|max] K",
    default=None,
    help="Keep the K with the best value in metrics.jsonl; min, the lowest, is the default: loss 2, accuracy:max 2.",
)
@work_dir_option
@click.option("--stale", is_flag=True, help="Also remove incomplete checkpoints, and what dead writers left.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask. Needed where there is no terminal to ask on.")
@dry_run_option
@output_options
def command(
    *,
    root: Place | None,
    root_option: Place | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: float | None,
    keep_best: tuple[str, int] | None,
    work_dir: Place | None,
    stale: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Remove the step-N checkpoints under ROOT that no rule keeps. Shows the plan, then asks.

    A checkpoint stays when any of the --keep rules wants it, when it is pinned (see `pin`), or when it is the newest
    complete one. Only complete checkpoints count; incomplete ones, and what dead writers left, are only removed with
    --stale. Imports and other names are never touched.
    """
    from ckptool.ops.prune import prune

    def confirm(plan: PrunePlan) -> bool:
        if not (as_json or quiet):
            _show_plan(plan)
        return not dry_run and bool(plan.remove) and (yes or _ask(plan))

    result = prune(
        root_choice(root, root_option),
        keep_last=keep_last or 0,
        keep_every=keep_every or 0,
        keep_within_seconds=keep_within or 0.0,
        keep_best=_best(keep_best),
        work_dir=work_dir,
        stale=stale,
        confirm=confirm,
    )
    names = result.details["removed"] if result.executed else [entry["name"] for entry in result.details["remove"]]
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=names)
    for name, fault in result.details["failed"].items():
        message(f"error: {name} was not removed: {fault}")
    return 1 if result.details["failed"] else 0


def _best(option: tuple[str, int] | None) -> tuple[str, str, int] | None:
    if option is None:
        return None
    metric, _, mode = option[0].partition(":")
    return metric, mode or "min", option[1]


def _ask(plan: PrunePlan) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: there is no terminal to ask on", hint="add --yes, or --dry-run to look")
    return click.confirm(f"Remove {len(plan.remove)}, {size(plan.freed_bytes)}?", err=True)


def _show_plan(plan: PrunePlan) -> None:
    for title, entries in (("keep", plan.keep), ("remove", plan.remove), ("broken", plan.broken)):
        for entry in entries:
            line(f"{title:<6}  {entry.name}  {size(entry.num_bytes)}  {entry.reason}")
    if plan.broken:
        line("broken ones stay; --stale removes those that are damaged or left by dead writers")
    if not plan.remove:
        line("nothing to remove")


def _show(result: Result) -> None:
    removed = result.details["removed"]
    if removed:
        freed = sum(entry["num_bytes"] for entry in result.details["remove"] if entry["name"] in removed)
        line(f"removed {len(removed)}, freed {size(freed)}")
    elif result.executed:
        line("nothing was removed")
    elif result.details["remove"]:
        line(f"nothing was removed; it would free {size(result.details['freed_bytes'])}")
