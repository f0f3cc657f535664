"""The data position of another system's checkpoint, brought into one of ours.

Another system orders its data in another way. So the count is what can be brought over, not the set of samples: what
that repeats and leaves out is said in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ckptool import runs
from ckptool.core.data_source import DataSource
from ckptool.core.history import NOTHING, UNKNOWN
from ckptool.core.plan import Result
from ckptool.core.position import DataPosition, Stretch
from ckptool.core.position_edits import jump, shares_places, with_edit
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError, UsageError
from ckptool.ops.data_edit import begin_change, write_position
from ckptool.ops.data_loaders import ORDERS, Hints, LoaderState, check_units, read_loader_state
from ckptool.ops.data_read import StoredPosition, read_position
from ckptool.ops.data_targets import counters_at
from ckptool.storage.files import Place
from ckptool.storage.place import local_path

SYSTEMS = tuple(ORDERS)


@dataclass(frozen=True)
class _Definition:
    """A stream for a checkpoint that has no data position yet."""

    sources: tuple[DataSource, ...] = ()
    weights: Mapping[str, float] | None = None
    seq_len: int | None = None
    seed: int | None = None
    global_batch_size: int | None = None

    def begin(self, name: str) -> DataPosition:
        if not self.sources or self.seq_len is None or self.global_batch_size is None:
            raise UsageError(
                f"{name} has no data position, so its stream has to be defined",
                hint="--source FILE.json --seq-len N --global-batch-size N (and --weights, --seed)",
            )
        return DataPosition.begin(
            self.sources,
            seq_len=self.seq_len,
            seed=self.seed or 0,
            global_batch_size=self.global_batch_size,
            weights=self.weights,
        )

    @property
    def is_empty(self) -> bool:
        return self == _Definition()


def import_position(
    name: str,
    system: str,
    *,
    states: Sequence[str] = (),
    world_size: int | None = None,
    batch_size: int | None = None,
    epoch: int | None = None,
    sources: Sequence[DataSource] = (),
    weights: Mapping[str, float] | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    global_batch_size: int | None = None,
    root: Place | None = None,
    reason: str = "",
    dry_run: bool = False,
) -> Result:
    """Let checkpoint `name` go on where the loader of `system` stood that left `states` (default: in `name` itself).

    `world_size`, `batch_size` (samples of one rank's batch) and `epoch` are for states that don't say them. The stream
    is that of the checkpoint's own data position; when it has none, `sources`, `weights`, `seq_len` (tokens), `seed`
    and `global_batch_size` (units) define it, as for `DataPosition.begin`. When the ranks' states don't add up to one
    count, nothing is written, and `details["disagreements"]` says who stands where. Raises
    MismatchError when the system counts other things than the stream, UsageError when a number is missing, and the
    errors of `read_loader_state` and `read_position`.
    """
    path = runs.resolve(name, root)
    if not states:
        local_path(path, "finding a loader's state in the checkpoint itself")
    if not dry_run:
        begin_change(path)
    definition = _Definition(tuple(sources), weights, seq_len, seed, global_batch_size)
    stored = _stored(name, root)
    if stored is not None and not definition.is_empty:
        raise UsageError(f"{path} has a data position, whose stream it keeps", hint="ckptool data edit changes it")
    batch = stored.position.global_batch_size if stored else definition.global_batch_size
    hints = Hints(world_size, batch_size, epoch, batch, tuple(states) or (str(path),))
    state = read_loader_state(system, hints)
    details: dict[str, Any] = {
        "from": system,
        "states": list(hints.states),
        "ranks": [{"rank": rank.rank, "facts": rank.facts} for rank in state.ranks],
        "disagreements": list(state.disagreements),
        "exact": state.position is not None,
    }
    if state.disagreements:
        return Result("data import", str(path), executed=False, details={**details, "changes": []})
    fresh = stored.position if stored else state.position or definition.begin(str(path))
    position, changes, notes = _moved(fresh, stored is not None, state, system)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    edited = with_edit(position, f"import from {system}", changes, reason=reason, when=now)
    if not dry_run:
        write_position(path, edited, stored.holder if stored else "data")
    details["changes"] = changes
    return Result("data import", str(path), executed=not dry_run, notes=tuple(notes), details=details)


def _stored(name: str, root: Place | None) -> StoredPosition | None:
    try:
        stored = read_position(name, root)
    except NotFoundError:
        return None
    if stored.num_lanes:
        raise UnsupportedError(f"{stored.path} is trained on a stream, which can only be read on from where it stands")
    last = stored.position.segment
    if last.done or not all(shares_places(segment, last) for segment in stored.position.segments):
        raise UsageError(
            f"the data of {stored.path} was changed before, so a count from the beginning means nothing in its stream",
            hint="import into a checkpoint from before that change",
        )
    return stored


def _moved(
    fresh: DataPosition, is_stored: bool, state: LoaderState, system: str
) -> tuple[DataPosition, list[str], list[str]]:
    """The position at the system's count, what to record of that, and what a person should know."""
    if state.position is not None:
        place, changes = _exact_place(fresh, state.position), ["the loader's sampler is ckptool's: the same place"]
        notes: list[str] = []
    else:
        check_units(state, fresh.segment.seq_len)
        place = _place(fresh, state)
        changes, notes = _effects(fresh, place, state, system)
    if is_stored:
        position, effect = jump(fresh, fresh.consumed, place)
        if effect.num_repeated:
            changes.append(f"{effect.num_repeated} units that this checkpoint was trained on since then come again")
        return position, [_where(position, place), *changes], notes
    if state.position is not None:
        return state.position, [_where(state.position, place), *changes], notes
    batch = fresh.global_batch_size
    num_steps = place // batch if state.num_steps is None else state.num_steps
    is_exact = num_steps * batch == place
    past = Stretch(place, num_steps, batch if is_exact else 0)
    stretches = (past,) if is_exact else (past, Stretch(0, 0, batch))
    position = replace(fresh, stretches=stretches, history=UNKNOWN if place else NOTHING)
    return position, [_where(position, place), *changes], notes


def _exact_place(fresh: DataPosition, record: DataPosition) -> int:
    if differences := fresh.differences_from(record):
        raise MismatchError("the loader's sampler is of another stream: " + "; ".join(differences))
    return record.consumed - record.segment.start + record.segment.phase


def _place(fresh: DataPosition, state: LoaderState) -> int:
    """The place in our stream of the sample that comes next."""
    if state.epoch is None or (state.epoch == 0 and len(fresh.segment.sources) > 1):
        return state.num_samples
    if len(fresh.segment.sources) > 1:
        raise UsageError(f"it stands in epoch {state.epoch}, and a mixture's sources have epochs of their own")
    (source,) = fresh.segment.sources
    if state.num_samples > source.num_units:
        raise MismatchError(
            f"its epoch has {state.num_samples} samples and more, {source.name} has {source.num_units} units: "
            "they don't count the same things",
            hint="a source whose units are that system's samples",
        )
    return state.epoch * source.num_units + state.num_samples


def _where(position: DataPosition, place: int) -> str:
    parts = [f"{name} epoch {at[0]} unit {at[1]}" for name, at in counters_at(position, place).items()]
    return f"goes on at place {place} of the stream: {', '.join(parts)}"


def _effects(fresh: DataPosition, place: int, state: LoaderState, system: str) -> tuple[list[str], list[str]]:
    """Per source, what another order of the same samples repeats and leaves out."""
    changes = [f"{system}: {len(state.ranks)} states agree on {state.num_samples} samples"]
    if state.epoch is not None:
        changes[0] += f" in epoch {state.epoch}"
    counters = counters_at(fresh, place)
    for source in fresh.segment.sources:
        epoch, done = counters[source.name]
        left = source.num_units - done
        if done:
            again = round(done * left / source.num_units)
            changes.append(
                f"{source.name}: {done} of {source.num_units} units of epoch {epoch} were trained, in another order; "
                f"about {again} of the {left} that come now were among them, and as many are left out of the epoch"
            )
        else:
            changes.append(f"{source.name}: epoch {epoch} begins, so nothing of it is trained again or left out")
    if state.num_waiting_tokens:
        changes.append(f"{state.num_waiting_tokens} tokens that it had read and not trained yet are not brought over")
    notes = [f"the order of {system} is {ORDERS[system]}; which samples it has given can't be told from a count"]
    if len(counters) == 1 and any(done for _, done in counters.values()):
        ((epoch, done),) = counters.values()
        left = fresh.segment.sources[0].num_units - done
        notes.append(
            f"ckptool data seek --to epoch:{epoch + 1} trains nothing again and leaves {left} units out; "
            f"--to epoch:{epoch} leaves nothing out and trains {done} again"
        )
    return changes, notes
