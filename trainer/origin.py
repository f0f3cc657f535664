"""Where a run begins: the checkpoint that it goes on from, or is initialised with, found and checked before anything is
built."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool import (
    CkptoolError,
    DamagedError,
    MismatchError,
    NotFoundError,
    Place,
    Provenance,
    TargetExistsError,
    UsageError,
)
from trainer.config import TrainConfig
from trainer.lora import Adapter, is_adapter_name
from trainer.rendezvous import is_restart
from trainer.tiers import later_steps, newest, step_of

#: What a repository of the Hub is called: a checkpoint has to be made of it.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run resumes or begins from. `passed_over` gives newer ones and what is wrong with each;
    `base` is where the weights under an adapter are, None without one, and `adapter` what provenance says of it.
    `has_its_config` is False when somebody has edited the config.json, and `not_taken` is an --init-from that has
    another source than the run that is resumed."""

    path: Place
    is_resume: bool
    provenance: Provenance
    stored_dtypes: tuple[str, ...]
    passed_over: tuple[tuple[str, str], ...] = ()
    base: Place | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    has_its_config: bool = True
    not_taken: str = ""

    @property
    def hf_folder(self) -> Path:
        return hf_folder_of(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """What the run needs as long as it goes on: every save copies the side files, an adapter has its base."""
        return tuple(path.name for path in (self.path, self.base) if path)

    def describe(self) -> list[str]:
        lines = [f"passed over {name}: {reason}" for name, reason in self.passed_over]
        lines += [f"{'resuming' if self.is_resume else 'beginning'} from {self.path}"]
        if not self.has_its_config:
            lines += ["note: its hf/config.json was edited since it was saved; the model is built as that now says"]
        if self.not_taken:
            lines += [
                f"note: --init-from {self.not_taken} is not taken: this root has a run, of another source; "
                "a new run needs another --root"
            ]
        return lines + ([f"training an adapter on the weights of {self.base}"] if self.base else [])


@functools.cache
def hf_folder_of(checkpoint: Place) -> Path:
    """A local folder with what a checkpoint has beside its weights: its own, or copies of what a URL has."""
    return ckptool.model_folder(checkpoint / "hf")


def find_origin(config: TrainConfig) -> Origin:
    """Decide what the run goes on or begins from.

    Raises NotFoundError when there is nothing, DamagedError when the root's checkpoints are all incomplete or the one
    to resume is of another step than its name, TargetExistsError when the root has a later step than the run begins
    at: it could be in the way of any save, and the next resume would take it for this run's.
    """
    origin = _resumed(config) or _initial(config)
    if adapter := _adapter_of(config, origin):
        base = _base_of(adapter, config, origin)
        origin = replace(origin, base=base, adapter=adapter.record(base))
    if origin.is_resume and config.init_from:
        source = _source_of(config.init_from, config)
        is_other = source is not None and source != origin.provenance.source
        origin = replace(origin, not_taken=config.init_from if is_other else "")
    free_again = {name for name, _ in origin.passed_over}
    first = origin.provenance.step if origin.is_resume else 0
    for root in config.places:
        taken = [name for name in later_steps(root, first) if name not in free_again]
        if taken:
            is_stranger = config.resume == "auto"  # else it would go on from there
            raise TargetExistsError(
                f"{ckptool.place(str(root)) / taken[0]} exists, and this run begins at step {first}",
                hint=(
                    "it is no checkpoint, so move it away" if is_stranger else "--resume auto goes on from the newest"
                )
                + "; or choose another --root",
            )
    return origin


def _adapter_of(config: TrainConfig, origin: Origin) -> Adapter | None:
    """The adapter to train. Raises MismatchError when the origin has one and the options not, or the other way."""
    stored = origin.provenance.adapter
    adapter = Adapter.of(config, stored)
    if adapter is None:
        if not stored:
            return None
        base = stored.get("base")
        raise MismatchError(
            f"{origin.path} holds an adapter of rank {stored.get('rank')}, {'no whole model' if base else 'unmerged'}",
            hint=f"--lora-rank {stored.get('rank')} goes on with it; all weights: "
            + (f"--init-from {base} and another --root" if base else "ckptool export --merge-adapter, and import that"),
        )
    if not origin.is_resume and stored.get("base"):
        raise MismatchError(f"{origin.path} is an adapter itself", hint=f"--init-from {stored.get('base')}")
    if origin.is_resume and not stored:
        raise MismatchError(
            f"{origin.path} is of a run that trains all weights; it can't go on with an adapter",
            hint=f"an adapter on these weights: --init-from {origin.path} and another --root",
        )
    return adapter


def _base_of(adapter: Adapter, config: TrainConfig, origin: Origin) -> Place:
    """The checkpoint whose weights the adapter is trained on. Raises MismatchError when it was trained on others."""
    stored = origin.provenance.adapter
    if not origin.is_resume:
        if stored:
            adapter.check_same(stored, origin.path)
        return origin.path
    adapter.check_same(stored, origin.path)
    base = _resolve(config.init_from or str(stored.get("base")), config)
    adapter.check_base(stored, base)
    return base


def _source_of(name: str, config: TrainConfig) -> dict[str, Any] | None:
    """Where the weights of a checkpoint were imported from, as its provenance has it, even many steps later. None when
    nothing says so: what a run began from may be gone."""
    try:
        provenance = ckptool.read_provenance(_resolve(name, config))
    except CkptoolError:
        return None
    return provenance.source if provenance else None


def _resolve(name: str, config: TrainConfig) -> Place:
    return ckptool.resolve(name, ckptool.place(str(config.root)))


def _resumed(config: TrainConfig) -> Origin | None:
    """The checkpoint to go on from. When torchrun has started the ranks again, that is the newest, as for `auto`: a run
    begins only where no later step is, so what is there now is its own."""
    asked = None
    if config.resume not in ("auto", "never"):
        asked = _open(_resolve(config.resume, config), is_resume=True)
    if not is_restart() and config.resume != "auto":
        return asked
    latest, broken = newest(config)
    if latest is not None and (asked is None or step_of(latest) > asked.provenance.step):
        return _open(latest, is_resume=True, passed_over=broken)
    if config.resume != "auto":
        return asked
    if broken:
        raise DamagedError(
            f"no checkpoint under {ckptool.place(str(config.root))} is complete: "
            + "; ".join(f"{name}: {reason}" for name, reason in broken[-3:]),
            hint="to begin anew, move them away or choose another --root",
        )
    return None


def _initial(config: TrainConfig) -> Origin:
    if config.init_from is None:
        raise NotFoundError(
            f"nothing to resume under {ckptool.place(str(config.root))}, and no --init-from",
            hint="ckptool import-hf MODEL, then --init-from with its name",
        )
    try:
        path = _resolve(config.init_from, config)
    except NotFoundError as error:
        is_model = (Path(config.init_from).expanduser() / "config.json").is_file()
        if is_model or _HUB_NAME.fullmatch(config.init_from):
            root = ckptool.place(str(config.root))
            error.hint = f"ckptool import-hf {config.init_from} base --root {root}, then --init-from base"
        raise
    return _open(path, is_resume=False)


def _open(path: Place, is_resume: bool, passed_over: tuple[tuple[str, str], ...] = ()) -> Origin:
    manifest = ckptool.open_checkpoint(path)
    weights = [tensor for fqn, tensor in manifest.tensors.items() if fqn.startswith("model.")]
    if not weights:
        raise UsageError(f"{path} holds no model", hint="ckptool inspect shows what it holds")
    if is_resume and "data.record" not in manifest.objects:
        raise UsageError(f"{path} is no training checkpoint, so it can't be resumed", hint=f"--init-from {path.name}")
    provenance = manifest.provenance or Provenance(tool_version=ckptool.__version__)
    if is_resume and step_of(path) not in (-1, provenance.step):
        told = f"its ckptool.json is of step {provenance.step}" if manifest.provenance else "it has no ckptool.json"
        raise DamagedError(
            f"{path} is not as it was saved: {told}", hint="give it back its name or the file, or move it away"
        )
    trained = [t for t in weights if is_adapter_name(t.fqn) or not provenance.adapter]
    dtypes = tuple(sorted({t.dtype for t in trained if getattr(torch, t.dtype).is_floating_point}))
    if not provenance.adapter.get("base"):  # else the config is of the base, which was held against it
        ckptool.read_config(hf_folder_of(path), len(weights), sum(tensor.num_bytes for tensor in weights))
    has_its_config = not is_resume or ckptool.is_as_written(path, "hf/config.json")
    return Origin(path, is_resume, provenance, dtypes, passed_over, has_its_config=has_its_config)
