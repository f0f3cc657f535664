"""`ckptool data show | verify | diff | plan`: they only read."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli._options import complete_name, name_argument, output_options, root_option
from ckptool.cli._output import line, show, table
from ckptool.core.plan import Result
from ckptool.errors import UsageError
from ckptool.storage.files import Place

_SHOWN_CHARACTERS = 100


@click.command("show", short_help="Position, epochs and tokens per source, the next units, all changes.")
@name_argument
@click.option("--next", "num_next", type=click.IntRange(0), default=4, show_default=True, help="Next units to list.")
@click.option("--text", is_flag=True, help="Show their text, from the trainer's token cache under the root.")
@root_option
@output_options
def show_command(*, name: str, num_next: int, text: bool, root: Place | None, as_json: bool, quiet: bool) -> None:
    """Show how far the data of checkpoint NAME was trained.

    Per source its epoch and how many units and tokens were trained; the next units; the world sizes that share the
    global batch evenly (all up to it work); segments, and what people changed.
    """
    from ckptool.ops.data_show import show_position

    result = show_position(name, root=root, num_next=num_next, text=text)
    show(result, as_json=as_json, quiet=quiet, human=_show_position, bare=[str(result.details["consumed"])])


def _show_position(result: Result) -> None:
    facts = result.details
    step = "" if facts["step"] is None else f" in {facts['step']:,} steps"
    line(f"{result.target}: {facts['consumed']:,} units trained{step}; {facts['global_batch_size']:,} units a step")
    rows = [
        [
            source["name"],
            f"{source['slots'] / 1024:.1%}",
            str(source["epoch"]),
            f"{source['place']:,} of {source['epoch_units']:,}",
            f"{source['num_units']:,}",
            f"{source['num_tokens']:,}",
        ]
        for source in facts["sources"]
    ]
    table(["source", "share", "epoch", "place", "units", "tokens"], rows, right=["share", "epoch", "units", "tokens"])
    for unit in facts["next_units"]:
        line(f"next: {_unit(unit)}")
        if "text" in unit:
            line(f"  {_shortened(unit['text'])}")
    worlds = ", ".join(map(str, facts["even_world_sizes"]))
    line(f"evenly shared by {worlds} ranks; any number up to {facts['max_world_size']:,} works")
    for segment in facts["segments"][1:]:
        shares = ", ".join(f"{name} {slots / 1024:.1%}" for name, slots in segment["slots"].items())
        jumped = f", from place {segment['phase']:,} on" if segment["phase"] else ""
        line(f"from unit {segment['start']:,}: {shares}, {segment['seq_len']:,} tokens a unit{jumped}")
    for edit in facts["edits"]:
        _show_edit(edit)


def _show_edit(edit: dict[str, Any]) -> None:
    reason = f" ({edit['reason']})" if edit["reason"] else ""
    line(f"{edit['when']} {edit['action']} at unit {edit['unit']:,}, step {edit['step']:,}{reason}")
    for change in edit["changes"]:
        line(f"  {change}")


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _unit(unit: dict[str, Any]) -> str:
    return f"unit {unit['number']:,} is {unit['source']} epoch {unit['epoch']} index {unit['index']:,}"


@click.command("verify", short_help="Does the position agree with itself, and with what was fed?")
@name_argument
@click.option("--replay", is_flag=True, help="Compute the digest of all trained units anew, and compare.")
@click.option(
    "--data",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Compare number and sizes of the files at PATH with those that source NAME was made of.",
)
@click.option("--full", is_flag=True, help="With --data: their contents, too.")
@root_option
@output_options
def verify_command(
    *, name: str, replay: bool, data: tuple[str, ...], full: bool, root: Place | None, as_json: bool, quiet: bool
) -> int:
    """Check the data position of checkpoint NAME: its record, its integers, its step and the file beside them agree.

    --replay walks through every unit that the record implies, from the first one on, and compares their digest with
    that of the units that the ranks were fed: equal, when each was trained once and no other. Ends with 4 when
    not, and with 3 when --data is other data.
    """
    from ckptool.ops.data_verify import verify_position

    paths = {source: path for source, _, path in (text.rpartition("=") for text in data)}
    if full and not paths:
        raise UsageError("--full reads the data, and there is no --data")
    if len(paths) < len(data):
        raise UsageError("--data names a source twice", hint="several paths of one source: PATH:PATH")
    result = verify_position(name, root=root, replay=replay, data=paths, full=full)
    bare = [finding.message for finding in result.findings]

    def human(_: Result) -> None:
        for finding in result.findings:
            line(f"{finding.kind}: {finding.message}")
        replayed = ", replayed" if result.details["replayed"] else ""
        if not result.findings:
            line(f"{result.target} is good: {result.details['consumed']:,} units{replayed}")

    show(result, as_json=as_json, quiet=quiet, human=human, bare=bare)
    return result.exit_code


@click.command("diff", short_help="What was trained between two checkpoints of a run.")
@click.argument("earlier", shell_complete=complete_name)
@click.argument("later", shell_complete=complete_name)
@root_option
@output_options
def diff_command(*, earlier: str, later: str, root: Place | None, as_json: bool, quiet: bool) -> None:
    """Say what was trained between checkpoints EARLIER and LATER of one run, and what was changed on the way.

    Ends with 3 when LATER doesn't go on from EARLIER.
    """
    from ckptool.ops.data_show import diff_positions

    result = diff_positions(earlier, later, root=root)
    facts = result.details
    show(result, as_json=as_json, quiet=quiet, human=_show_diff, bare=[str(facts["to_unit"] - facts["from_unit"])])


def _show_diff(result: Result) -> None:
    facts = result.details
    line(f"units {facts['from_unit']:,} to {facts['to_unit']:,}, in {facts['num_steps']:,} steps")
    for source in facts["trained"]:
        line(
            f"{source['name']}: {source['num_units']:,} units, up to epoch {source['epoch']} place {source['place']:,}"
        )
    for edit in facts["edits"]:
        _show_edit(edit)


@click.command("plan", short_help="Which units of the next step each rank reads.")
@name_argument
@click.option("--world-size", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option(
    "--micro-batch-size", type=click.IntRange(1), default=1, show_default=True, help="Units of one forward pass."
)
@root_option
@output_options
def plan_command(
    *, name: str, world_size: int, micro_batch_size: int, root: Place | None, as_json: bool, quiet: bool
) -> None:
    """Say which units of the step after checkpoint NAME each of --world-size ranks would read."""
    from ckptool.ops.data_show import plan_step

    result = plan_step(name, world_size, root=root, micro_batch_size=micro_batch_size)
    bare = [" ".join(str(unit["number"]) for unit in rank["units"]) for rank in result.details["ranks"]]
    show(result, as_json=as_json, quiet=quiet, human=_show_plan, bare=bare)


def _show_plan(result: Result) -> None:
    facts = result.details
    line(
        f"{facts['global_batch_size']:,} units from unit {facts['consumed']:,} on, over {facts['world_size']:,} ranks "
        f"in {facts['num_micro_batches']:,} micro-batches each"
    )
    for rank in facts["ranks"]:
        dummies = f"; {rank['num_dummy_micro_batches']} without a unit" if rank["num_dummy_micro_batches"] else ""
        line(f"rank {rank['rank']} reads {len(rank['units'])}{dummies}")
        for unit in rank["units"]:
            line(f"  {_unit(unit)}")
