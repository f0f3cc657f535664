"""The state of a run, how it goes to a checkpoint, and how it comes back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import ckptool
from ckptool import AsyncSaver, DamagedError, DataPosition, Fed, Manifest, MismatchError, PendingSave, Place
from trainer.config import TrainConfig
from trainer.lora import Adapter, is_adapter_name
from trainer.metrics import Log
from trainer.model import model_state, named_parameters
from trainer.optimizer import check_same_optimizer, optimizer_state, restore_groups
from trainer.origin import Origin, hf_folder_of
from trainer.parallel import Ranks
from trainer.tiers import Uploads, prune, step_path


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
    check_same_optimizer(state.optimizer, state.parameters(), manifest)
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
        prune(ckptool.place(str(config.root)), config, (*origin.names, *uploads.in_use), log)

    if saver is not None:
        # Between here and the next update only buffers could change.
        has_buffers = bool(stored["model"].keys() - state.parameters().keys())
        return saver.save(stored, target, **what, wait_for_copy=has_buffers, then=on_durable)
    ckptool.save(stored, target, **what)
    state.last_saved = target
    if ranks.rank == 0:
        on_durable()
    return None


def _side_folder(state: TrainingState, origin: Origin) -> Path:
    """The origin's `hf/`; the last save's when somebody has removed the origin since."""
    if state.last_saved is not None and not origin.hf_folder.is_dir():
        return hf_folder_of(state.last_saved)
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
