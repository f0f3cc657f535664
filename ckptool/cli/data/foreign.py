"""`ckptool data import`: the data position of another system's checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._options import dry_run_option, name_argument, output_options, root_option
from ckptool.cli._output import line, show, table
from ckptool.cli.data.change import Weights, read_sources, reason_option
from ckptool.core.plan import Result
from ckptool.storage.files import Place

_SYSTEMS = ("torchtitan", "torchdata", "megatron", "olmo", "streaming")
_EXIT_MISMATCH = 3


@click.command("import", short_help="Go on where another system's loader stood.")
@name_argument
@click.option("--from", "system", type=click.Choice(_SYSTEMS), required=True, help="What wrote the loader's state.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="PATH",
    help="Where that state is: a checkpoint folder or a file; once for each rank's file.  [default: NAME itself]",
)
@click.option("--world-size", type=click.IntRange(1), help="Ranks that loader ran on, where the state doesn't say.")
@click.option("--batch-size", type=click.IntRange(1), help="Samples of one rank's batch, where the state doesn't say.")
@click.option("--epoch", type=click.IntRange(0), help="Epochs finished before; torchdata's state doesn't say.")
@click.option(
    "--source",
    "source_files",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="For a NAME without data position: what data edit --add-source takes.",
)
@click.option("--weights", type=Weights(), metavar="A=.7,B=.3", help="Shares of several sources.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a unit.")
@click.option("--seed", type=int, help="Of the order.  [default: 0]")
@click.option("--global-batch-size", type=click.IntRange(1), help="Units of a step.")
@reason_option
@root_option
@dry_run_option
@output_options
def import_command(
    *,
    name: str,
    system: str,
    states: tuple[str, ...],
    world_size: int | None,
    batch_size: int | None,
    epoch: int | None,
    source_files: tuple[Path, ...],
    weights: dict[str, float] | None,
    seq_len: int | None,
    seed: int | None,
    global_batch_size: int | None,
    reason: str,
    root: Place | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Let training from checkpoint NAME go on at the count of samples that another system's loader had reached.

    The stream is that of NAME's own data position. When it has none, --source, --seq-len and --global-batch-size define
    it. The other system has its samples in another order, so some units come again and others are left out: how many,
    and what to type to avoid either, is said. Only the data items of NAME are touched.

    When the ranks' states don't add up to one count, they are listed, nothing is written, and it ends with 3.
    """
    from ckptool.ops.data_import import import_position

    result = import_position(
        name,
        system,
        states=states,
        world_size=world_size,
        batch_size=batch_size,
        epoch=epoch,
        sources=[source for path in source_files for source in read_sources(path)],
        weights=weights,
        seq_len=seq_len,
        seed=seed,
        global_batch_size=global_batch_size,
        root=root,
        reason=reason,
        dry_run=dry_run,
    )
    disagreements = result.details["disagreements"]
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=disagreements or [result.target])
    return _EXIT_MISMATCH if disagreements else 0


def _show(result: Result) -> None:
    facts = result.details
    names = list(dict.fromkeys(name for rank in facts["ranks"] for name in rank["facts"]))
    rows = [[rank["rank"], *(str(rank["facts"].get(name, "")) for name in names)] for rank in facts["ranks"]]
    table(["rank", *(name.replace("_", " ") for name in names)], rows, right=[n.replace("_", " ") for n in names])
    for disagreement in facts["disagreements"]:
        line(f"no one count: {disagreement}")
    if facts["disagreements"]:
        line(f"{result.target} is not changed")
        return
    for change in facts["changes"]:
        line(change)
    line(f"{result.target} {'is changed' if result.executed else 'is not changed: this was a dry run'}")
