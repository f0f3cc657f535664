"""DataPosition: where training stands in its data, as one integer over a pure order.

Units (windows of tokens) are numbered g = 0, 1, 2, ... without end: unit g is place `g % num_units` of epoch
`g // num_units`. `consumed` says how many of them were trained; the end of an epoch is not a state. Neither the world
size nor the batch size is part of the position, so both may change at any step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ckptool.core.order import ORDER_VERSION, unit_index
from ckptool.errors import DamagedError, MismatchError

CURSOR_LENGTH = 8


@dataclass(frozen=True)
class DataPosition:
    """A place in the stream of units, with all that defines the stream.

    `seq_len` is in tokens. `fingerprint` describes the source: equal fingerprints mean equal tokens.
    `global_batch_size` (units a step) only informs: it may change between runs.
    """

    num_units: int
    seq_len: int
    seed: int
    global_batch_size: int
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    consumed: int = 0
    order_version: int = ORDER_VERSION

    def unit(self, g: int) -> tuple[int, int]:
        """The (epoch, index into the source) of unit g."""
        epoch, place = divmod(g, self.num_units)
        return epoch, unit_index(self.seed, epoch, self.num_units, place)

    def next_units(self) -> range:
        """The numbers of the units that the next step trains."""
        return step_units(self.consumed, self.global_batch_size)

    def advance(self, num_trained: int) -> DataPosition:
        """The position after `num_trained` more units were trained."""
        return replace(self, consumed=self.consumed + num_trained)

    def at(self, record: DataPosition) -> DataPosition:
        """This stream at the place of `record`, read from a checkpoint.

        Raises MismatchError, naming each difference, when `record` is of another stream.
        """
        differences = _differences(record._stream(), self._stream())
        if differences:
            raise MismatchError(
                "the data is not what the checkpoint was trained on: " + "; ".join(differences),
                hint="give the data, --seq-len and --seed of that run, or begin a new run with --init-from",
            )
        return replace(self, consumed=record.consumed)

    def cursor(self) -> list[int]:
        """The numbers stored in `data.cursor`: consumed, order version, then zeros; CURSOR_LENGTH in all."""
        return [self.consumed, self.order_version] + [0] * (CURSOR_LENGTH - 2)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, location: str) -> DataPosition:
        """Parse `to_json`'s text. Raises DamagedError, naming `location`, for a missing or mistyped field."""
        try:
            record = json.loads(text)
            position = cls(**{f.name: record[f.name] for f in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"{location}: not a data position: {error!r}") from error
        _check_types(position, location)
        return position

    def _stream(self) -> dict[str, Any]:
        """What defines the stream, flat."""
        source = {f"source.{name}": value for name, value in sorted(self.fingerprint.items())}
        return {**source, "num_units": self.num_units, "seq_len": self.seq_len, "seed": self.seed} | {
            "order_version": self.order_version
        }


def step_units(consumed: int, global_batch_size: int) -> range:
    """The numbers of the units of a step that begins when `consumed` units were trained."""
    return range(consumed, consumed + global_batch_size)


def rank_units(units: range, rank: int, world_size: int) -> range:
    """Rank `rank`'s part of a step's units: those g where `(g - units.start) % world_size == rank`."""
    return units[rank::world_size]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = [*old, *(name for name in new if name not in old)]
    return [f"{name} {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _check_types(position: DataPosition, location: str) -> None:
    numbers = {name: value for name, value in asdict(position).items() if name != "fingerprint"}
    for name, value in numbers.items():
        if type(value) is not int or (name != "seed" and value < 0):
            raise DamagedError(f"{location}: {name} of the data position is {value!r}")
    if position.num_units < 1 or not isinstance(position.fingerprint, dict):
        raise DamagedError(f"{location}: not a data position: no units, or no fingerprint")
