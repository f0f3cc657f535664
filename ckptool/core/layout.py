"""Which placement each tensor of a checkpoint has on each axis of a mesh, from rules by parameter name."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptool.core.mesh import Mesh, Placement, Replicate, Shard
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UsageError, name_some

#: Axes over which FSDP2 cuts dim 0 of every parameter, when no rule says otherwise.
FSDP_AXES = ("dp_shard", "dp", "fsdp")

#: Axes that only ever hold copies.
COPY_AXES = ("dp_replicate",)

#: A tensor that belongs to no parameter (a position, a random state) is stored whole up to this size.
WHOLE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Rule:
    """Mesh axis `axis` cuts the parameters that match the glob `pattern` along `dim`; None leaves them whole.

    A negative dim counts from the end. `num_parts` as in `core.mesh.Shard`.
    """

    axis: str
    pattern: str
    dim: int | None
    num_parts: int = 1


class Layout:
    """The placements of a checkpoint's tensors on a mesh.

    Axis by axis, a rule for the whole name wins, then the first glob that matches. An optimizer's state has the
    placements of its parameter. Raises UsageError for an axis that no rule explains, MismatchError for a rule that
    names no parameter or a dim that one doesn't have.
    """

    def __init__(self, mesh: Mesh, rules: Iterable[Rule], tensors: Mapping[str, TensorEntry]) -> None:
        self.mesh = mesh
        self._parameters = parameters(tensors)
        self._exact: dict[tuple[str, str], Rule] = {}
        self._globs: list[Rule] = []
        rules = list(rules)
        for rule in rules:
            if any(c in rule.pattern for c in "*?["):
                self._globs.append(rule)
            else:
                self._exact.setdefault((rule.axis, rule.pattern), rule)
        self._check_axes(rules)
        #: Per fqn, one placement per mesh axis.
        self.placements = {fqn: self._place(entry) for fqn, entry in tensors.items()}
        self._check_matches(rules, tensors)

    def _check_axes(self, rules: Iterable[Rule]) -> None:
        named = {rule.axis for rule in rules}
        if unknown := named - set(self.mesh.axes):
            raise UsageError(f"placements for {name_some(unknown)}, which is no axis of the mesh {self.mesh}")
        if parts := {rule.pattern for rule in rules if rule.axis in FSDP_AXES and rule.num_parts > 1}:
            raise UsageError(f"FSDP cuts dims as wholes, not in parts: {name_some(parts)}")
        if len(fsdp := [axis for axis in self.mesh.axes if axis in FSDP_AXES]) > 1:
            raise UsageError(f"mesh axes {' and '.join(fsdp)} both stand for FSDP: make them one")
        for axis, size in self.mesh.to_json().items():
            if size > 1 and axis not in {*named, *FSDP_AXES, *COPY_AXES}:
                raise UsageError(
                    f"nothing says what mesh axis {axis!r} cuts",
                    hint="name it dp_shard or dp_replicate, or write its placements into a file: --placements FILE",
                )

    def _check_matches(self, rules: Iterable[Rule], tensors: Mapping[str, TensorEntry]) -> None:
        names = {name for fqn in tensors for name in self._names(fqn)}
        for rule in rules:
            if rule.pattern not in names and not any(map(re.compile(fnmatch.translate(rule.pattern)).match, names)):
                raise MismatchError(
                    f"the {rule.axis} placement of {rule.pattern!r} names no parameter of the checkpoint",
                    hint="ckptool inspect lists their names",
                )

    def own_rank(self, fqn: str) -> int | None:
        """The rank that an entry is of by its name: 3 for `rng.rank_3`; None for parameters and for most others."""
        return None if fqn in self._parameters else _rank_in(fqn)

    def _names(self, fqn: str) -> tuple[str, ...]:
        parameter = self._parameters.get(fqn)
        return (fqn,) if parameter is None else (parameter, fqn)

    def _place(self, entry: TensorEntry) -> tuple[Placement, ...]:
        rules = [self._rule(axis, entry) for axis in self.mesh.axes]
        dims = [None if rule is None else self._dim(rule, entry) for rule in rules]
        placements: list[Placement] = []
        for i, (axis, rule, dim) in enumerate(zip(self.mesh.axes, rules, dims, strict=True)):
            if rule is None or dim is None:
                placements.append(Replicate())
            elif axis in FSDP_AXES:
                # FSDP2 comes after the axes to its right: it cuts what each of them left over.
                later = zip(self.mesh.sizes[i + 1 :], dims[i + 1 :], strict=True)
                placements.append(Shard(dim, math.prod(size for size, other in later if other == dim)))
            else:
                placements.append(Shard(dim, rule.num_parts))
        return tuple(placements)

    def _rule(self, axis: str, entry: TensorEntry) -> Rule | None:
        if not entry.shape:
            return None
        names = self._names(entry.fqn)
        found = next((self._exact[axis, name] for name in names if (axis, name) in self._exact), None)
        found = found or next(
            (r for r in self._globs if r.axis == axis and any(fnmatch.fnmatchcase(n, r.pattern) for n in names)), None
        )
        if found is not None or axis not in FSDP_AXES:
            return found
        is_small = entry.fqn not in self._parameters and entry.num_bytes <= WHOLE_BYTES
        return None if is_small else Rule(axis, entry.fqn, 0)

    def _dim(self, rule: Rule, entry: TensorEntry) -> int | None:
        if rule.dim is None:
            return None
        dim = rule.dim + len(entry.shape) if rule.dim < 0 else rule.dim
        if not 0 <= dim < len(entry.shape):
            raise MismatchError(
                f"the {rule.axis} placement of {rule.pattern!r} cuts dim {rule.dim} of {entry.fqn}, "
                f"whose shape is {list(entry.shape)}"
            )
        return dim


def parameters(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """fqn -> name of its parameter, for parameters and for optimizer state of the same shape.

    Parameters are the tensors of the section `model`, wherever in the fqn that stands first; in a checkpoint without
    one, all tensors but those of one rank. An optimizer's tensor has its parameter's name in its own, before the last
    part.
    """
    named = {fqn: name for fqn in tensors if (name := _in_model(fqn))}
    named = named or {fqn: fqn for fqn in tensors if _rank_in(fqn) is None}
    shapes = {name: tensors[fqn].shape for fqn, name in named.items()}
    found = {}
    for fqn, entry in tensors.items():
        *parts, _ = fqn.split(".")
        within = (".".join(parts[i:]) for i in range(len(parts)))
        parameter = next((name for name in within if shapes.get(name) == entry.shape), named.get(fqn))
        if parameter is not None:
            found[fqn] = parameter
    return found


def _rank_in(fqn: str) -> int | None:
    found = re.search(r"(?:^|[._])rank[._-]?(\d{1,6})(?:[._]|$)", fqn)
    return int(found[1]) if found else None


def _in_model(fqn: str) -> str:
    """The name within the section `model`; "" for names that are not in one."""
    before, _, name = f".{fqn}".partition(".model.")
    return name if "optim" not in before else ""
