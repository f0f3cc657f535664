"""Where a checkpoint comes from and how its names were made: the content of `ckptool.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckptool.errors import DamagedError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Naming:
    """How live parameter names were made from the source's names, so that export can undo it.

    `transforms` are the `repr`s of the transformers weight transforms that fired at import, in mapping order.
    """

    name: str
    architecture: str = ""
    transforms: tuple[str, ...] = ()
    library_version: str = ""


@dataclass(frozen=True)
class Provenance:
    """The record written beside every checkpoint of ours as `ckptool.json`.

    Names are live parameter names, without the `model.` prefix. `ties` maps an alias to the parameter that holds its
    bytes; `stored_tied_names` are the names of tied tensors that the source stored, aliases or not, so that an export
    stores the same ones; `untied` are pairs that the source's config ties but whose stored values differ: both were
    kept. `adapter` is not empty when there is a LoRA adapter among the weights: its `rank`, `alpha` and `targets`, and
    where there is nothing else the checkpoint that it was trained on, as `base` and `base_digest`. `part` is not empty
    when an import left tensors of the model out: its `keys` and `exclude`.
    """

    tool_version: str
    created: str = ""
    step: int = 0
    world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    naming: Naming | None = None
    ties: dict[str, str] = field(default_factory=dict)
    stored_tied_names: tuple[str, ...] = ()
    untied: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    part: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """The content of `ckptool.json`, as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any, location: str) -> Provenance:
        """Build from parsed JSON. Raises DamagedError when a field is of another type, or the format is later."""
        if not isinstance(record, dict) or not isinstance(record.get("format_version"), int):
            raise DamagedError(f"{location}: not a ckptool record")
        if record["format_version"] > FORMAT_VERSION:
            raise DamagedError(
                f"{location}: written by a later ckptool (format {record['format_version']}, this one reads "
                f"{FORMAT_VERSION})",
                hint="pip install -U ckptool",
            )
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        try:
            if values.get("naming") is not None:
                naming = dict(values["naming"])
                naming["transforms"] = tuple(naming.get("transforms", ()))
                values["naming"] = Naming(**naming)
            values["stored_tied_names"] = tuple(values.get("stored_tied_names", ()))
            provenance = cls(**values)
        except (TypeError, ValueError) as error:
            raise DamagedError(f"{location}: {error}") from error
        fault = next((f.name for f in fields(cls) if not _is_of(_TYPES[f.name], getattr(provenance, f.name))), None)
        if fault:
            raise DamagedError(f"{location}: {fault} is not {_TYPES[fault]}")
        return provenance


#: What each field of the record must be, in the words of the spec.
_TYPES = {
    "tool_version": "a string",
    "created": "a string",
    "step": "an integer",
    "world_size": "an integer",
    "mesh": "an object",
    "source": "an object",
    "naming": "an object or null",
    "ties": "an object of strings",
    "stored_tied_names": "an array of strings",
    "untied": "an object of strings",
    "libraries": "an object",
    "adapter": "an object",
    "part": "an object",
    "format_version": "an integer",
}


def _is_of(kind: str, value: Any) -> bool:
    match kind:
        case "a string":
            return isinstance(value, str)
        case "an integer":
            return type(value) is int and value >= 0
        case "an array of strings":
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        case "an object of strings":
            return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
        case "an object or null":
            return value is None or _is_naming(value)
        case _:
            return isinstance(value, dict)


def _is_naming(naming: Naming) -> bool:
    texts = (naming.name, naming.architecture, naming.library_version, *naming.transforms)
    return all(isinstance(text, str) for text in texts)
