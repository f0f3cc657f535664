"""`ckptool top [ROOT]`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from ckptool.cli._options import output_options, root_choice, root_choices, work_dir_option
from ckptool.cli._output import console, duration, line, show, size
from ckptool.core.plan import Result
from ckptool.core.text import counted, one_line
from ckptool.storage.files import Place

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


@click.command("top", short_help="Watch a run while it trains.")
@root_choices
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Where the run will end, for the time left.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--once", is_flag=True, help="Show one picture and end, as is done anyway when the output is no terminal."
)
@work_dir_option
@output_options
def command(
    *,
    root: Place | None,
    root_option: Place | None,
    steps: int | None,
    interval: float,
    once: bool,
    work_dir: Place | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Watch the run in ROOT while it trains: loss, speed, memory, the last complete checkpoint, the time left.

    Reads metrics.jsonl, which the trainer writes; the trainer does not notice. "no run has the root now" says that the
    run has ended or was killed. Ctrl-C ends it.
    """
    from ckptool.ops.top import Watch

    watch = Watch(root_choice(root, root_option), steps, work_dir)
    if not (once or as_json or quiet) and sys.stdout.isatty():
        _show_live(watch, interval)
        return
    result = watch.look()
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[str(result.details["step"] or 0)])


def _show(result: Result) -> None:
    for text in picture(result):
        line(text)


def _show_live(watch: Any, interval_seconds: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(console=console(), auto_refresh=False) as live:
        while True:
            lines = [one_line(text) for text in picture(watch.look())]
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(interval_seconds)


def picture(result: Result) -> list[str]:
    """The lines that are shown, at most 80 columns wide for names of usual length."""
    facts = result.details
    if facts["step"] is None:
        return [f"{result.target}: no step yet"]
    rows = [
        ("step", _step(facts)),
        ("loss", _loss(facts)),
        ("", curve(facts["losses"], _CURVE_WIDTH)),
        ("speed", _speed(facts)),
        ("phases", _phases(facts)),
        ("ranks", _ranks(facts)),
        ("memory", size(facts["max_memory_bytes"]) if facts["max_memory_bytes"] is not None else "-"),
        ("checkpoint", _checkpoint(facts)),
        ("job", _job(facts)),
        ("", _heard(facts)),
    ]
    return [result.target, *(f"  {name:<11}{text}".rstrip() for name, text in rows)]


def curve(numbers: Sequence[float], width: int) -> str:
    """A line of bars from the lowest to the highest number; of many, neighbours share a bar at their mean."""
    if not numbers:
        return ""
    stride = -(-len(numbers) // width)
    means = [sum(part) / len(part) for part in (numbers[i : i + stride] for i in range(0, len(numbers), stride))]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _step(facts: Any) -> str:
    of = f" of {facts['total_steps']:,}" if facts["total_steps"] else ""
    left = f", {duration(facts['seconds_left'])} left" if facts["seconds_left"] is not None else ""
    position = f", data position {facts['consumed']:,}" if facts["consumed"] is not None else ""
    return f"{facts['step']:,}{of}{left}{position}"


def _loss(facts: Any) -> str:
    numbers = (("", "loss"), ("held out ", "eval_loss"), ("grad norm ", "grad_norm"), ("lr ", "lr"))
    known = [f"{name}{facts[key]:.4g}" for name, key in numbers if facts[key] is not None]
    skipped = [f"{facts['num_skipped']} of the last steps SKIPPED"] if facts["num_skipped"] else []
    return "  ".join([*known, *skipped]) or "-"


def _speed(facts: Any) -> str:
    rate, seconds = facts["tokens_per_second"], facts["step_seconds"]
    known = [f"{rate:,.0f} tokens/s"] if rate is not None else []
    known += [f"{seconds:.3g} s a step"] if seconds is not None else []
    known += [f"MFU {facts['mfu']:.1%}"] if facts["mfu"] is not None else []
    return ", ".join(known) or "-"


def _ranks(facts: Any) -> str:
    """What the ranks do without waiting for each other, and those that make the others wait."""
    found = facts["ranks"]
    if found is None:
        return "-"
    data, probe = found["data_seconds"], found["probe_seconds"]
    names = ", ".join(str(rank) for rank in found["behind"][:8])
    more = ", ..." if len(found["behind"]) > 8 else ""
    behind = f"; BEHIND: {names}{more}" if names else ""
    return f"data {_span(data, 1, 's')}, product {_span(probe, 1000, 'ms')}{behind}"


def _span(seconds: Sequence[float], factor: float, unit: str) -> str:
    low, high = (f"{factor * bound:.2g}" for bound in (min(seconds), max(seconds)))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _phases(facts: Any) -> str:
    """Seconds of rank 0 for each phase of a step."""
    known = [f"{name.replace('_', ' + ')} {took:.3g} s" for name, took in facts["phases"].items() if took is not None]
    return ", ".join(known) or "-"


def _checkpoint(facts: Any) -> str:
    found, took = facts["checkpoint"], facts["checkpoint_seconds"]
    if found is None:
        return "none is complete yet"
    return f"{found['name']}, {duration(found['age_seconds'])} ago{f', saved in {took:.3g} s' if took else ''}"


def _job(facts: Any) -> str:
    known = [counted(facts["world_size"], "rank")] if facts["world_size"] is not None else []
    known += [f"started {facts['num_attempts']} times"] if facts["num_attempts"] > 1 else []
    known += [f"{counted(facts['num_lost_steps'], 'step')} trained again"] if facts["num_lost_steps"] else []
    return ", ".join(known) or "-"


def _heard(facts: Any) -> str:
    age = duration(facts["age_seconds"])
    if facts["held"] is False:
        return f"last heard of {age} ago: no run has the root now"
    if not facts["quiet"]:
        return f"last heard of {age} ago"
    return f"QUIET for {age}: {'not ended, hanging?' if facts['held'] else 'ended, or hanging?'}"
