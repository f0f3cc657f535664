"""What other systems' checkpoints say of where training stood in its data: one count over all ranks, or who differs.

Formats, each as its own code writes it: torchdata 0.11 (`StatefulDataLoader.state_dict`), torchtitan
(`ParallelAwareDataloader`), Megatron-LM (`args` in `common.pt` or `model_optim_rng.pt`), OLMo-core (`train/rank*.pt`),
MosaicML Streaming (`StreamingDataset.state_dict`, also inside a Composer checkpoint).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckptool.core.position import DataPosition
from ckptool.errors import DamagedError, MismatchError, NotFoundError, UnsupportedError, UsageError
from ckptool.formats.loader_states import find_dicts, read_integer, read_objects, read_state, unpickle_state
from ckptool.runs import resolve
from ckptool.storage.files import Place

#: How each system orders its data, for people who are told that it is another order than ours.
ORDERS = {
    "torchtitan": "the documents as they come, dealt out to the ranks",
    "torchdata": "that of its own sampler or data set",
    "megatron": "its own shuffle index",
    "olmo": "its own shuffle of the epoch",
    "streaming": "its own shuffle of the epoch",
}


class RankState(NamedTuple):
    """What one rank's state says, as numbers by name."""

    rank: str
    facts: dict[str, int]


@dataclass(frozen=True)
class LoaderState:
    """What the states of all ranks say together.

    `num_samples` are those of `epoch`, or when that is None those since the beginning; both are 0 and None when
    `disagreements` say why there is no one count. `position` is our own, where the loader's sampler is ours.
    `num_waiting_tokens` were read and not trained yet.
    """

    ranks: tuple[RankState, ...]
    disagreements: tuple[str, ...] = ()
    num_samples: int = 0
    epoch: int | None = None
    num_steps: int | None = None
    seq_len: int | None = None
    num_waiting_tokens: int = 0
    position: DataPosition | None = None


@dataclass(frozen=True)
class Hints:
    """What a person can say that a state may lack. `batch_size` is in samples of one rank's batch."""

    world_size: int | None = None
    batch_size: int | None = None
    epoch: int | None = None
    global_batch_size: int | None = None
    states: Sequence[str] = field(default_factory=tuple)


def read_loader_state(system: str, hints: Hints) -> LoaderState:
    """The state of `system`'s loader in the files and folders `hints.states`.

    Raises NotFoundError when there is none in them, DamagedError when it can't be read, UsageError when it lacks a
    number that a person has to give, UnsupportedError for one that has no count of samples.
    """
    read: dict[str, Callable[[Hints], LoaderState]] = {
        "torchtitan": _torchtitan,
        "torchdata": _torchdata,
        "megatron": _megatron,
        "olmo": _olmo,
        "streaming": _streaming,
    }
    return read[system](hints)


def _torchtitan(hints: Hints) -> LoaderState:
    """`dataloader.dp_rank_N`, pickled by torchtitan itself, and `dataloader.world_size`."""
    path = resolve(_only(hints.states))
    found = [
        (str(name), state)
        for _, tree in read_objects(path, lambda keys: _titan_key(keys) or keys[-1:] == ("world_size",))
        for _, loader in find_dicts(tree, lambda d: any(_titan_key((key,)) for key in d))
        for name, state in loader.items()
    ]
    sizes = [value for name, value in found if name == "world_size"]
    blobs = {int(name.removeprefix("dp_rank_")): value for name, value in found if _titan_key((name,))}
    if not blobs:
        raise NotFoundError(f"{path} has no dataloader.dp_rank_N", hint="torchtitan saves it with training state only")
    states = [
        (str(rank), unpickle_state(_bytes(blobs[rank], path), f"{path}: dp_rank_{rank}")) for rank in sorted(blobs)
    ]
    world_size = sizes[0] if sizes and type(sizes[0]) is int else len(blobs)
    return _of_ranks(states, world_size, hints, _titan_step(path), endless=True)


def _titan_step(path: Place) -> int | None:
    """torchtitan 0.3 saves its step as a number, older ones as a tensor."""
    for _, tree in read_objects(path, lambda keys: keys[-2:] == ("train_state", "step")):
        for _, state in find_dicts(tree, lambda d: type(d.get("step")) is int):
            return state["step"]
    return read_integer(path, "train_state.step")


def _titan_key(keys: Sequence[str | int]) -> bool:
    return bool(keys) and re.fullmatch(r"dp_rank_\d{1,7}", str(keys[-1])) is not None


def _torchdata(hints: Hints) -> LoaderState:
    """One state a rank, in files or under keys; a DCP checkpoint that doesn't key them keeps one rank's only."""
    states = [
        (name, state)
        for where, content in _contents(hints.states, ("*.pt", "*.pth", "*.bin", "*.pkl", "*.json"), _is_torchdata_key)
        for name, state in find_dicts(content, _is_torchdata, where)
    ]
    if not states:
        raise NotFoundError(f"no state of a StatefulDataLoader in {' '.join(hints.states)}")
    states = [(str(number), state) for number, (_, state) in enumerate(states)]
    if hints.world_size is None and _record(states[0][1], "0") is None:
        raise UsageError(
            f"{len(states)} states were found; how many ranks there were is not in them",
            hint="--world-size N, and --state once for each rank's file",
        )
    return _of_ranks(states, hints.world_size or len(states), hints, None, endless=False)


def _is_torchdata(state: Mapping[str, Any]) -> bool:
    return "_num_yielded" in state or {"_snapshot", "_steps_since_snapshot"} <= set(state)


def _is_torchdata_key(keys: Sequence[str | int]) -> bool:
    markers = {"_num_yielded", "_snapshot", "_steps_since_snapshot", "_sampler_iter_state", "_iterator_finished"}
    return bool(markers & set(map(str, keys)))


def _of_ranks(
    states: list[tuple[str, Any]], world_size: int, hints: Hints, step: int | None, *, endless: bool
) -> LoaderState:
    """StatefulDataLoaders of all ranks. `endless` ones count from the beginning, others begin anew each epoch."""
    ranks = tuple(RankState(rank, _torchdata_facts(state, rank)) for rank, state in states)
    records = {_record(state, rank) for rank, state in states}
    if len(records) == 1 and (record := records.pop()) is not None:
        return LoaderState(ranks, position=DataPosition.from_json(record, "the sampler's state in the loader's"))
    disagreements = _missing_ranks(ranks, world_size) + _differences(ranks, ("batches", "samples"))
    waiting = sum(rank.facts.get("waiting_tokens", 0) for rank in ranks)
    if disagreements:
        return LoaderState(ranks, tuple(disagreements), num_waiting_tokens=waiting)
    first = ranks[0].facts
    if "samples" in first and not endless:
        num_samples = world_size * first["samples"]
    else:
        num_samples = world_size * first["batches"] * _batch_size(first["batches"] * world_size, hints, step)
    epoch = None if endless else hints.epoch or 0
    return LoaderState(ranks, (), num_samples, epoch, step, num_waiting_tokens=waiting)


def _batch_size(num_batches: int, hints: Hints, step: int | None) -> int:
    """Samples in a batch: as said, or from the number of steps and the global batch."""
    if hints.batch_size is not None:
        return hints.batch_size
    if step and hints.global_batch_size and num_batches and step * hints.global_batch_size % num_batches == 0:
        return step * hints.global_batch_size // num_batches
    if not num_batches:
        return 1
    raise UsageError(
        "how many samples a batch of one rank has is not in the state",
        hint="--batch-size N (torchtitan: training.local_batch_size)",
    )


def _torchdata_facts(state: Mapping[str, Any], rank: str) -> dict[str, int]:
    """How far one StatefulDataLoader is, with and without workers."""
    batches, main, num_since = _yielded(state, rank)
    facts = {"batches": batches}
    sampler = main.get("_sampler_iter_state")
    if isinstance(sampler, Mapping) and type(sampler.get("samples_yielded")) is int and not num_since:
        facts["samples"] = sampler["samples_yielded"]
    for _, inner in find_dicts(state, lambda d: "sample_idx" in d or "inputs_buffer" in d):
        for name, key in (("documents", "sample_idx"), ("epoch", "epoch")):
            if type(inner.get(key)) is int:
                facts[name] = facts.get(name, 0) + inner[key] if name == "documents" else inner[key]
        if isinstance(inner.get("inputs_buffer"), list):
            facts["waiting_tokens"] = facts.get("waiting_tokens", 0) + len(inner["inputs_buffer"])
    return facts


def _yielded(state: Mapping[str, Any], rank: str) -> tuple[int, Mapping[str, Any], int]:
    """Batches that a loader has given, the part of its state that has the sampler's, and the batches since then."""
    snapshot = state.get("_snapshot")
    if not isinstance(snapshot, Mapping):
        return _count(state.get("_num_yielded"), rank), state, 0
    main = snapshot.get("_main_snapshot")
    num_since = _count(state.get("_steps_since_snapshot"), rank)
    return (
        _count(snapshot.get("_snapshot_step"), rank) + num_since,
        main if isinstance(main, Mapping) else {},
        num_since,
    )


def _record(state: Mapping[str, Any], rank: str) -> str | None:
    """The record of a GlobalBatchSampler in a loader that has one as its batch sampler."""
    _, main, num_since = _yielded(state, rank)
    sampler = main.get("_sampler_iter_state")
    record = sampler.get("record") if isinstance(sampler, Mapping) else None
    if type(record) is not str:
        return None
    if num_since:
        raise UnsupportedError(
            f"rank {rank}: the sampler's place is that of {num_since} batches before",
            hint="a checkpoint of a loader with snapshot_every_n_steps=1",
        )
    return record


def _megatron(hints: Hints) -> LoaderState:
    """`consumed_train_samples` of the arguments; the same in each rank's file of the older format."""
    folder = _megatron_folder(Path(_only(hints.states)))
    files = [folder] if folder.is_file() else _first_that_exist(folder, "common.pt", "mp_rank_*/model_optim_rng.pt")
    ranks = []
    for path in files:
        content = read_state(path)
        arguments = content.get("args") if isinstance(content, Mapping) else None
        if not isinstance(arguments, Mapping) or type(arguments.get("consumed_train_samples")) is not int:
            raise NotFoundError(f"{path} has no args.consumed_train_samples", hint="a checkpoint of Megatron-LM has it")
        facts = {"consumed_train_samples": arguments["consumed_train_samples"]}
        facts |= {k: arguments[k] for k in ("seq_length", "global_batch_size") if type(arguments.get(k)) is int}
        if type(content.get("iteration")) is int:
            facts["iteration"] = content["iteration"]
        ranks.append(RankState(path.parent.name if len(files) > 1 else path.name, facts))
    first = ranks[0].facts
    disagreements = _differences(ranks, tuple(first))
    if disagreements:
        return LoaderState(tuple(ranks), tuple(disagreements))
    num_samples = first["consumed_train_samples"]
    return LoaderState(tuple(ranks), (), num_samples, None, first.get("iteration"), first.get("seq_length"))


def _megatron_folder(path: Path) -> Path:
    """The checkpoint in `path`, which may be the folder of all of a run."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path
    name = tracker.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(r"\d{1,18}|release", name):
        raise DamagedError(f"{tracker} says {name!r:.40}, which is no iteration")
    return path / (name if name == "release" else f"iter_{int(name):07d}")


def _olmo(hints: Hints) -> LoaderState:
    """`data_loader` in the trainer state of each rank. Its epochs are counted from 1."""
    ranks, kinds = [], set()
    for where, content in _contents(hints.states, ("train/rank*.pt", "rank*.pt"), lambda keys: False):
        loader = content.get("data_loader") if isinstance(content, Mapping) else None
        if not isinstance(loader, Mapping) or type(loader.get("tokens_processed")) is not int:
            raise NotFoundError(f"{where} has no data_loader.tokens_processed")
        names = ("batches_processed", "tokens_processed", "seed", "epoch", "sequence_length")
        facts = {name: loader[name] for name in names if type(loader.get(name)) is int}
        facts |= {name: content[name] for name in ("global_step", "epoch") if type(content.get(name)) is int}
        kinds.add(loader.get("dataset_type", "fsl"))
        ranks.append(RankState(Path(where).stem.removeprefix("rank"), facts))
    if not ranks:
        raise NotFoundError(f"no trainer state of OLMo-core in {' '.join(hints.states)}", hint="train/rank0.pt has it")
    if kinds - {"fsl"}:
        raise UnsupportedError("a loader of sequences of different lengths has no count of samples")
    first = ranks[0].facts
    world_size = hints.world_size or content.get("world_size")
    missing = _missing_ranks(ranks, world_size) if type(world_size) is int else []
    disagreements = missing + _differences(ranks, tuple(first))
    if disagreements:
        return LoaderState(tuple(ranks), tuple(disagreements))
    seq_len = first.get("sequence_length", 0)
    if seq_len < 1 or first["tokens_processed"] % seq_len:
        raise UnsupportedError(f"{first['tokens_processed']} tokens are no whole number of sequences of {seq_len}")
    epoch = first.get("epoch", 1) - 1
    return LoaderState(tuple(ranks), (), first["tokens_processed"] // seq_len, epoch, first.get("global_step"), seq_len)


def _streaming(hints: Hints) -> LoaderState:
    """`epoch` and `sample_in_epoch`, the same for all ranks; of training, where a checkpoint has several."""
    found = [
        (where, state)
        for where, content in _contents(hints.states, ("*.pt", "*.json"), lambda keys: "dataset_state" in keys)
        for keys, state in find_dicts(content, lambda d: {"epoch", "sample_in_epoch"} <= set(d))
        if "eval" not in keys.split(".")
    ]
    if not found:
        raise NotFoundError(f"no state of a StreamingDataset in {' '.join(hints.states)}")
    names = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes")
    ranks = tuple(
        RankState(name, {key: state[key] for key in names if type(state.get(key)) is int}) for name, state in found
    )
    facts = ranks[0].facts
    if not {"epoch", "sample_in_epoch"} <= set(facts):
        raise DamagedError(f"{ranks[0].rank}: epoch and sample_in_epoch are no numbers")
    disagreements = _differences(ranks, tuple(facts))
    if disagreements:
        return LoaderState(ranks, tuple(disagreements))
    return LoaderState(ranks, (), facts["sample_in_epoch"], max(facts["epoch"], 0))


def _contents(
    states: Sequence[str], patterns: Sequence[str], wanted: Callable[[Sequence[str | int]], bool]
) -> Iterator[tuple[str, Any]]:
    """The content of each state: a file, the objects of a DCP checkpoint, or the files of a folder by `patterns`."""
    for text in states:
        path = Path(text)
        if path.is_file():
            yield str(path), read_state(path)
        elif (path / ".metadata").is_file():
            yield from read_objects(path, wanted)
        else:
            for file in _first_that_exist(path, *patterns):
                yield str(file), read_state(file)


def _first_that_exist(folder: Path, *patterns: str) -> list[Path]:
    for pattern in patterns:
        if files := sorted(folder.glob(pattern), key=_natural):
            return files
    what = "holds none of" if folder.is_dir() else "is not there; it should hold"
    raise NotFoundError(f"{folder} {what} {', '.join(patterns)}", hint="--state leads to the other system's checkpoint")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts rank2 before rank10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _missing_ranks(ranks: Sequence[RankState], world_size: int) -> list[str]:
    if len(ranks) == world_size:
        return []
    if len(ranks) > world_size:
        return [f"{len(ranks)} states for {world_size} ranks"]
    there = {rank.rank for rank in ranks}
    missing = [str(rank) for rank in range(world_size) if str(rank) not in there]
    return [f"of {world_size} ranks, {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''} have no state"]


def _differences(ranks: Sequence[RankState], names: Sequence[str]) -> list[str]:
    """For each fact that is not the same on all ranks, which rank has which value."""
    found = []
    for name in names:
        by_value: dict[int | None, list[str]] = {}
        for rank in ranks:
            by_value.setdefault(rank.facts.get(name), []).append(rank.rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {_some(of)}" for value, of in by_value.items())
            found.append(f"{name.replace('_', ' ')}: {told}")
    return found


def _some(ranks: list[str]) -> str:
    return f"rank {', '.join(ranks[:8])}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _only(states: Sequence[str]) -> str:
    if len(states) != 1:
        raise UsageError("one --state, please: the checkpoint has all ranks")
    return states[0]


def _count(value: Any, rank: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise DamagedError(f"the state of rank {rank} has no number of batches")
    return value


def _bytes(value: Any, path: object) -> bytes:
    if not isinstance(value, bytes):
        raise DamagedError(f"{path}: the state of a rank is no pickle")
    return value


def check_units(state: LoaderState, seq_len: int) -> None:
    """Raises MismatchError when the system's samples are of another length than the units of our stream."""
    if state.seq_len is not None and state.seq_len != seq_len:
        raise MismatchError(
            f"its samples have {state.seq_len} tokens, the units of this stream {seq_len}",
            hint=f"a stream with --seq-len {state.seq_len} counts the same things",
        )
