"""Where a run begins, and how its state goes to a checkpoint and comes back."""

from __future__ import annotations

import functools
import itertools
import os
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import ckptool
from ckptool import (
    AsyncSaver,
    CkptoolError,
    DamagedError,
    DataPosition,
    Fed,
    Manifest,
    MismatchError,
    NotFoundError,
    PendingSave,
    Place,
    Provenance,
    TargetExistsError,
    UsageError,
)
from trainer.config import TrainConfig
from trainer.lora import Adapter, is_adapter_name
from trainer.metrics import Log
from trainer.model import model_state, named_parameters
from trainer.optimizer import check_same_optimizer, optimizer_state, restore_groups
from trainer.parallel import Ranks
from trainer.tiers import Uploads, later_steps, newest, step_of, step_path

#: What a repository of the Hub is called: a checkpoint has to be made of it.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run resumes or begins from. `passed_over` gives newer ones and what is wrong with each;
    `base` is where the weights under an adapter are, None without one, and `adapter` what provenance says of it.
    `has_its_config` is False when somebody has edited the config.json."""

    path: Place
    is_resume: bool
    provenance: Provenance
    stored_dtypes: tuple[str, ...]
    passed_over: tuple[tuple[str, str], ...] = ()
    base: Place | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    has_its_config: bool = True

    @property
    def hf_folder(self) -> Path:
        """A local folder with what is beside the weights: the checkpoint's own, or copies of what a URL has."""
        return _hf_folder(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """What the run needs as long as it goes on: every save copies the side files, an adapter has its base."""
        return tuple(path.name for path in (self.path, self.base) if path)

    def describe(self) -> list[str]:
        lines = [f"passed over {name}: {reason}" for name, reason in self.passed_over]
        lines += [f"{'resuming' if self.is_resume else 'beginning'} from {self.path}"]
        if not self.has_its_config:
            lines += ["note: its hf/config.json was edited since it was saved; the model is built as that now says"]
        return lines + ([f"training an adapter on the weights of {self.base}"] if self.base else [])


@dataclass
class TrainingState:
    """All that a checkpoint holds. `step` counts finished optimizer steps; `lanes` says where streams stand; `fed` is
    what this rank was fed since the last save."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    ties: dict[str, str]
    position: DataPosition
    adapter: Adapter | None = None
    fed: Fed = field(default_factory=lambda: Fed(0))
    step: int = 0
    lanes: dict[str, dict[str, str]] = field(default_factory=dict)
    last_saved: Place | None = None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by checkpoint name, a tied one once."""
        return trained_parameters(self.model, self.ties, self.adapter is not None)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors that are stored: all, or the adapter's."""
        stored = model_state(self.model, self.ties)
        return {name: t for name, t in stored.items() if is_adapter_name(name)} if self.adapter else stored

    def base_weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors that a checkpoint without an adapter holds."""
        return {name: t for name, t in model_state(self.model, self.ties).items() if not is_adapter_name(name)}

    def state_dict(self) -> dict[str, Any]:
        """What is stored; its tensors share memory with the model and the optimizer."""
        return {
            "model": self.weights(),
            "optim": optimizer_state(self.optimizer, self.parameters()),
            "step": torch.tensor(self.step, dtype=torch.int64),
            "data": {
                "cursor": torch.tensor(self.position.cursor(), dtype=torch.int64),
                "record": self.position.to_json(),
                **({"lane": self.lanes} if self.lanes else {}),
            },
        }


def trained_parameters(
    model: PreTrainedModel, ties: dict[str, str], only_adapter: bool
) -> dict[str, torch.nn.Parameter]:
    """All parameters by checkpoint name, a tied one once; or those of the adapter alone."""
    parameters = {name: p for name, p in named_parameters(model).items() if name not in ties}
    return {name: p for name, p in parameters.items() if is_adapter_name(name)} if only_adapter else parameters


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


@functools.cache
def _hf_folder(checkpoint: Place) -> Path:
    return ckptool.model_folder(checkpoint / "hf")


def _resolve(name: str, config: TrainConfig) -> Place:
    return ckptool.resolve(name, ckptool.place(str(config.root)))


def _resumed(config: TrainConfig) -> Origin | None:
    """The checkpoint to go on from. When torchrun has started the ranks again, that is the newest, as for `auto`: a run
    begins only where no later step is, so what is there now is its own."""
    asked = None
    if config.resume not in ("auto", "never"):
        asked = _open(_resolve(config.resume, config), is_resume=True)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not is_restart and config.resume != "auto":
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
        ckptool.read_config(_hf_folder(path), len(weights), sum(tensor.num_bytes for tensor in weights))
    has_its_config = not is_resume or ckptool.is_as_written(path, "hf/config.json")
    return Origin(path, is_resume, provenance, dtypes, passed_over, has_its_config=has_its_config)


def load_weights(state: TrainingState, origin: Origin, log: Log) -> None:
    """Fill the model from the checkpoint a run begins from, cast to the dtype that is trained."""
    wanted = sorted({str(p.dtype).removeprefix("torch.") for p in state.parameters().values()})
    if not state.adapter and list(origin.stored_dtypes) != wanted:
        log.say(f"weights stored as {', '.join(origin.stored_dtypes)} are trained as {', '.join(wanted)}")
    _load_base(state, origin.path)


def _load_base(state: TrainingState, path: Place) -> None:
    """Fill the model's own weights, and the adapter's too where one was imported beside them."""
    manifest = ckptool.open_checkpoint(path)
    weights = state.base_weights()
    if manifest.provenance and manifest.provenance.adapter:
        adapter = state.weights()
        stored = {fqn.removeprefix("model.") for fqn in manifest.tensors if is_adapter_name(fqn)}
        if other := stored ^ adapter.keys():
            raise MismatchError(
                f"the adapter in {path} is beside other layers: {min(other)}, for one",
                hint=f"--lora-targets {manifest.provenance.adapter.get('targets')}",
            )
        weights |= adapter
    ckptool.load({"model": weights}, path, allow_cast=True)


def resume(state: TrainingState, origin: Origin, log: Log, accept_data_change: str = "") -> None:
    """Bring back everything: weights, optimizer, step and data position.

    Raises MismatchError when the model, a dtype or the optimizer is not the checkpoint's, or when the data is not and
    there is no reason to accept that.
    """
    manifest = ckptool.open_checkpoint(origin.path)
    check_same_optimizer(state.optimizer, manifest)
    # As many lanes as there are in the checkpoint: whether these are the right ones is for the data to say.
    state.lanes = _stored_lanes(manifest)
    stored = state.state_dict()
    if origin.base:
        _load_base(state, origin.base)
    ckptool.load(stored, origin.path)
    step = int(stored["step"])
    record = DataPosition.from_json(stored["data"]["record"], f"{origin.path}: data.record", num_steps=step)
    if record.cursor() != stored["data"]["cursor"].tolist():
        raise DamagedError(f"{origin.path}: data.cursor and data.record disagree")
    restore_groups(state.optimizer, state.parameters(), stored["optim"]["param_groups"], log.say)
    if accept_data_change:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        state.position = ckptool.accept_data_change(state.position, record, reason=accept_data_change, when=now)
        for change in [change for edit in state.position.edits[len(record.edits) :] for change in edit.changes]:
            log.say(f"accepted: {change}")
    else:
        try:
            state.position = state.position.at(record)
        except MismatchError as error:
            error.hint = (
                "give the data, --seq-len and --seed of that run; --accept-data-change REASON goes on with other data; "
                "or begin a new run with --init-from"
            )
            raise
    state.fed = Fed(record.consumed)
    state.lanes = stored["data"].get("lane", {})
    state.step = step


def _stored_lanes(manifest: Manifest) -> dict[str, dict[str, str]]:
    """The names of the lanes' states in a checkpoint, by source, as a template to load them into."""
    lanes: dict[str, dict[str, str]] = {}
    for fqn in manifest.objects:
        if fqn.startswith("data.lane."):
            name, _, number = fqn.removeprefix("data.lane.").rpartition(".")
            lanes.setdefault(name, {})[number] = ""
    return lanes


def save(
    state: TrainingState,
    origin: Origin,
    config: TrainConfig,
    ranks: Ranks,
    log: Log,
    uploads: Uploads,
    saver: AsyncSaver | None = None,
) -> PendingSave | None:
    """Publish `step-N` under the root, upload it, and prune; with a `saver`, beside the training. All ranks take
    part."""
    target = step_path(config.root, state.step)
    ranks.from_rank0(lambda: _clear_way(target, origin, log))
    state.position = state.position.with_history(ranks.gather_data(state.fed))
    state.fed = Fed(state.position.consumed)
    ties = {} if state.adapter else state.ties  # an adapter's checkpoint holds neither end of a tie
    provenance = replace(
        origin.provenance,
        tool_version=ckptool.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        step=state.step,
        world_size=ranks.world_size,
        mesh=ranks.axes,
        ties=ties,
        adapter=origin.adapter,
        libraries={"torch": torch.__version__, "transformers": transformers.__version__},
    )
    stored = state.state_dict()
    what: dict[str, Any] = {
        "provenance": provenance,
        "ties": {f"model.{alias}": f"model.{canonical}" for alias, canonical in ties.items()},
        "side_folder": _side_folder(state, origin),
        "position": state.position,
        "overwrite": _may_replace(target, origin),
    }

    def on_durable() -> None:
        uploads.offer(target)
        _prune(config, origin, uploads, log)

    if saver is not None:
        # Between here and the next update only buffers could change.
        has_buffers = bool(stored["model"].keys() - state.parameters().keys())
        return saver.save(stored, target, **what, wait_for_copy=has_buffers, then=on_durable)
    ckptool.save(stored, target, **what)
    state.last_saved = target
    if ranks.rank == 0:
        on_durable()
    return None


def _prune(config: TrainConfig, origin: Origin, uploads: Uploads, log: Log) -> None:
    """Remove what the run doesn't keep, now that a newer checkpoint is on the disk. Never a reason to stop training."""
    if not (config.keep_last or config.keep_every):
        return
    in_use = (*origin.names, *uploads.in_use)
    root = ckptool.place(str(config.root))
    try:
        result = ckptool.prune(
            root, keep_last=config.keep_last, keep_every=config.keep_every, dead_saves=True, in_use=in_use
        )
    except CkptoolError as error:
        log.say(f"old checkpoints were not removed: {error}")
        return
    for name, fault in result.details["failed"].items():
        log.say(f"{name} was not removed: {fault}")


def _side_folder(state: TrainingState, origin: Origin) -> Path:
    """The origin's `hf/`; the last save's when somebody has removed the origin since."""
    if state.last_saved is not None and not origin.hf_folder.is_dir():
        return _hf_folder(state.last_saved)
    return origin.hf_folder


def _may_replace(target: Place, origin: Origin) -> bool:
    """True for a URL at which there is one that was passed over: a store can't move it aside."""
    return not isinstance(target, Path) and target.name in dict(origin.passed_over)


def _clear_way(target: Place, origin: Origin, log: Log) -> None:
    """Move aside a damaged checkpoint that was passed over and now has the name of a new one. Nothing is deleted."""
    if isinstance(target, Path) and target.name in dict(origin.passed_over) and target.exists():
        names = (
            f"{target.name}.damaged{number}" for number in itertools.chain([""], map("-{}".format, itertools.count(2)))
        )
        aside = next(path for name in names if not (path := target.with_name(name)).exists())
        log.say(f"moving the damaged {target} aside, to {aside.name}")
        target.rename(aside)


def param_dtype(option: str, origin: Origin) -> torch.dtype:
    """The dtype of the trained weights.

    Raises MismatchError for `keep` when the checkpoint mixes several, and for another one than the resumed run's.
    """
    if option != "keep":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[option]
        if origin.is_resume and origin.stored_dtypes != (str(dtype).removeprefix("torch."),):
            raise MismatchError(
                f"{origin.path} was trained as {', '.join(origin.stored_dtypes)}, and --param-dtype is {option}",
                hint="--param-dtype keep goes on as before; in another dtype, --init-from begins anew",
            )
        return dtype
    if len(origin.stored_dtypes) != 1:
        raise MismatchError(
            f"{origin.path} mixes {', '.join(origin.stored_dtypes)}, so --param-dtype keep has no one dtype",
            hint="--param-dtype fp32",
        )
    return getattr(torch, origin.stored_dtypes[0])
