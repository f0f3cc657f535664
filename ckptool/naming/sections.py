"""Which part of a trainer's checkpoint an entry belongs to, and what the model itself calls it: told from its keys.

Trainers save nested dicts: `{"model": ..., "optim": ..., "step": ...}`, the model's tensors bare beside the rest
(torchtitan), one folder each (accelerate), all of it below a further key (a Stateful of one's own). DCP keeps the keys
of each entry, except in safetensors; some dicts are flat to begin with: `model.w`, `optim.state.w.exp_avg`. No torch
here: `inspect` waits for none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ckptool.core.checkpoint import Manifest
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError, name_some

MODEL = "model"
OPTIMIZER = "optimizer"

#: Key -> section, wherever in an entry's keys it stands first. The rest is of the section "other".
_KEYS = {
    "model": MODEL,
    "model_state_dict": MODEL,
    "module": MODEL,
    "state_dict": MODEL,
    "optim": OPTIMIZER,
    "optimizer": OPTIMIZER,
    "optimizers": OPTIMIZER,
    "optimizer_state_dict": OPTIMIZER,
    "optimizer_states": OPTIMIZER,
    "lr_scheduler": "schedule",
    "lr_schedulers": "schedule",
    "scheduler": "schedule",
    "data": "data",
    "dataloader": "data",
    "loader": "data",
    "step": "step",
    "steps_run": "step",
    "global_step": "step",
    "train_state": "step",
    "rng": "random state",
    "rng_state": "random state",
}

#: Parts that wrappers of modules put into names: activation checkpointing, torch.compile, the first FSDP.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")

#: What the first FSDP calls parameters that it has joined into one (LOCAL_STATE_DICT).
_FLAT_PARAMETER = "_flat_param"


@dataclass(frozen=True)
class Sections:
    """`of` gives the section of every fqn; `model` the fqn of each of the model's tensors, by the model's own name.

    `wrappers` are the wrappers whose parts were taken out of names.
    """

    of: Mapping[str, str]
    model: Mapping[str, str]
    wrappers: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """How many entries each section has."""
        found: dict[str, int] = {}
        for section in self.of.values():
            found[section] = found.get(section, 0) + 1
        return found


def read_sections(manifest: Manifest) -> Sections:
    """The sections of a checkpoint. Without one for the model, what stands bare at the top is the model's.

    Raises MismatchError when two tensors get one name (wrappers' parts are taken out), UnsupportedError for
    parameters that the first FSDP has joined.
    """
    told = _told_by_flat_names(manifest)
    of: dict[str, str] = {}
    names: dict[str, str] = {}
    bare: list[str] = []
    for fqn in (*manifest.tensors, *manifest.objects):
        keys = _keys(fqn, manifest.paths, told)
        place = next((i for i, key in enumerate(keys[:-1]) if _section(key)), None)
        if place is not None:
            of[fqn] = _section(keys[place])
            names[fqn] = ".".join(keys[place + 1 :])
        else:
            section = _section(keys[0]) if len(keys) == 1 else ""
            of[fqn] = section if section and section != MODEL else "other"
            if len(keys) == 1 and of[fqn] == "other" and fqn in manifest.tensors:
                bare.append(fqn)
    if not any(of[fqn] == MODEL for fqn in manifest.tensors):
        names.update({fqn: fqn for fqn in bare})
        of.update(dict.fromkeys(bare, MODEL))
    model, wrappers = _unwrapped({fqn: names[fqn] for fqn in manifest.tensors if of[fqn] == MODEL})
    return Sections(of, model, wrappers)


def only_model(manifest: Manifest) -> Manifest:
    """The model's part of a checkpoint, under its names there; one tied to something else becomes a tensor of its own.

    `paths` has the keys of every name: once the rest is gone, a flat `model.w` alone would not tell its section.
    Raises NotFoundError when there is no model, besides what `read_sections` raises.
    """
    chosen = set(read_sections(manifest).model.values())
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if fqn in chosen}
    if not tensors:
        where = manifest.location
        raise NotFoundError(f"{where} has no tensors of a model", hint=f"ckptool inspect {where} shows what it holds")
    told = _told_by_flat_names(manifest)
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn in tensors:
        recorded = manifest.paths.get(fqn, ())
        paths[fqn] = recorded if len(recorded) > 1 else tuple(_keys(fqn, manifest.paths, told))
    ties = {alias: canonical for alias, canonical in manifest.ties.items() if alias in tensors and canonical in tensors}
    return replace(manifest, tensors=tensors, objects={}, paths=paths, ties=ties)


def model_only_notes(whole: Manifest, model: Manifest) -> tuple[str, ...]:
    """What to say where `only_model` has kept every tensor."""
    if len(model.tensors) < len(whole.tensors):
        return ()
    return ("--model-only: all tensors are taken for the model's, since no name says that it is an optimizer's",)


def _told_by_flat_names(manifest: Manifest) -> frozenset[str]:
    """The sections that names saved without nesting tell by what stands before their first dot.

    None, unless both a model's and an optimizer's are among them: the Hub's names begin with `model.` too. Beside
    tensors in no section, such as `lm_head.weight`, `model.` is a part of the model's own names.
    """
    flat = [fqn for fqn in (*manifest.tensors, *manifest.objects) if len(manifest.paths.get(fqn, ())) == 1]
    dotted = {fqn: _section(fqn.partition(".")[0]) for fqn in flat if "." in fqn}
    found = frozenset(dotted.values())
    if not {MODEL, OPTIMIZER} <= found:
        return frozenset()
    is_bare = any(not section and fqn in manifest.tensors for fqn, section in dotted.items())
    return found - {"", MODEL} if is_bare else found - {""}


def _keys(fqn: str, paths: Mapping[str, tuple[str | int, ...]], told: Collection[str]) -> list[str]:
    """The keys that lead to an entry. Where none are recorded, a section's name before the first dot is one; where the
    name is one key, it is if the section is among those `told` by flat names."""
    recorded = paths.get(fqn, ())
    if len(recorded) > 1:
        return [str(key) for key in recorded]
    first, dot, rest = fqn.partition(".")
    section = _section(first) if dot else ""
    return [first, rest] if section and (not recorded or section in told) else [fqn]


def _section(key: str) -> str:
    stem, _, number = key.rpartition("_")
    return _KEYS.get(stem if number.isdecimal() else key, "")


def _unwrapped(names: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """name without wrappers -> fqn, and the wrappers met."""
    model: dict[str, str] = {}
    met: set[str] = set()
    joined: list[str] = []
    for fqn, name in names.items():
        parts = name.split(".")
        met.update(set(parts) & set(WRAPPERS))
        plain = ".".join(part for part in parts if part not in WRAPPERS)
        if _FLAT_PARAMETER in parts:
            joined.append(fqn)
        if plain in model:
            raise MismatchError(f"{model[plain]} and {fqn} are both the model's {plain}")
        model[plain] = fqn
    if joined:
        raise UnsupportedError(
            f"{name_some(joined)}: parameters that FSDP has joined into one (LOCAL_STATE_DICT)",
            hint="save with StateDictType.SHARDED_STATE_DICT",
        )
    return model, tuple(sorted(met))


def common_prefix(names: Iterable[str], known: Iterable[str]) -> str:
    """What stands before every one of `names` and not before the `known` ones, such as the attribute that holds the
    model in a LightningModule; "" when there is no such thing."""
    names = list(names)
    known = set(known)
    first = names[0].split(".") if names else []
    for i in range(len(first)):
        prefix = "".join(f"{part}." for part in first[:i])
        if all(name.startswith(prefix) for name in names) and any(name.removeprefix(prefix) in known for name in names):
            return prefix
    return ""
