"""From what a person says about the target - a world size, a mesh, a file of placements - to a Layout."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ckptool.core.checkpoint import Manifest
from ckptool.core.layout import Layout, Rule
from ckptool.core.mesh import Mesh
from ckptool.errors import DamagedError, UsageError
from ckptool.formats.hf_folder import model_folder
from ckptool.storage.files import MAX_JSON_BYTES, Place, read_bytes

_PLAN_AXES = ("tp", "ep")
_MODEL_PREFIX = "model."


def chosen_mesh(world_size: int | None, mesh: str | None) -> Mesh:
    """The mesh of `--world-size N`, FSDP2 over all ranks, or of `--mesh`. Raises UsageError unless one is given."""
    if (world_size is None) == (mesh is None):
        raise UsageError("say one of --world-size N and --mesh AXIS=N,...")
    return Mesh.of({"dp": world_size}) if world_size is not None else Mesh.parse(mesh or "")


def read_layout(path: Place, manifest: Manifest, mesh: Mesh, placements: Path | None) -> Layout:
    """The layout of the checkpoint `path` on `mesh`.

    Rules come from the file `placements`, and for axes tp and ep that it doesn't speak of, from the plan that
    transformers has for the model in `hf/config.json`. Raises as `Layout`, `read_placements` and
    `naming.parallel_plan.plan_rules` do.
    """
    rules = read_placements(placements) if placements else []
    spoken_of = {rule.axis for rule in rules}
    planned = [axis for axis in _PLAN_AXES if mesh.to_json().get(axis, 1) > 1 and axis not in spoken_of]
    if planned:
        from ckptool.naming.parallel_plan import plan_rules

        live = [e for f, e in manifest.tensors.items() if f.startswith(_MODEL_PREFIX)]
        known = {f.removeprefix(_MODEL_PREFIX) for f in manifest.tensors}
        found = plan_rules(model_folder(path / "hf"), planned, len(live), sum(entry.num_bytes for entry in live))
        rules += [rule for rule in found if rule.pattern in known]
        if not {rule.axis for rule in rules} >= set(planned):
            raise UsageError(f"{path}: the {'/'.join(planned)} plan names no parameter of it", hint="--placements FILE")
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if fqn not in manifest.ties}
    return Layout(mesh, rules, tensors)


def read_placements(file: Path) -> list[Rule]:
    """Rules from a TOML file: a table per mesh axis, `pattern = dim` in it.

    Instead of a dim, `"whole"` leaves parameters uncut and `{ dim = 1, parts = 2 }` cuts each of two fused parts.
    Raises DamagedError when the file is something else.
    """
    try:
        tables = tomllib.loads(read_bytes(file, MAX_JSON_BYTES).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file}: not TOML: {error}") from error
    rules = []
    for axis, table in tables.items():
        if not isinstance(table, dict):
            raise DamagedError(f"{file}: {axis} is no table; write [{axis}] and below it pattern = dim")
        rules += [_rule(file, axis, pattern, value) for pattern, value in table.items()]
    return rules


def _rule(file: Path, axis: str, pattern: str, value: Any) -> Rule:
    if value == "whole":
        return Rule(axis, pattern, None)
    fields = value if isinstance(value, dict) else {"dim": value}
    dim, num_parts = fields.get("dim"), fields.get("parts", 1)
    if type(dim) is not int or type(num_parts) is not int or num_parts < 1 or not fields.keys() <= {"dim", "parts"}:
        raise DamagedError(
            f"{file}: [{axis}] {pattern!r} = {value!r} is no placement",
            hint='write a dim, "whole", or { dim = 1, parts = 2 }',
        )
    return Rule(axis, pattern, dim, num_parts)
