"""Hugging Face -> DCP, once, on one CPU process."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool import engine as copy_engine
from ckptool.core.cuts import cut_tensor, stream_tensor
from ckptool.core.interfaces import Progress, Source
from ckptool.core.parts import one_part
from ckptool.core.plan import Plan, Result
from ckptool.core.provenance import Provenance
from ckptool.errors import UsageError, name_some
from ckptool.formats.dcp_sink import DcpSink, dcp_parts
from ckptool.formats.hf_config import match_config
from ckptool.formats.hf_folder import EXTRA_NAME, HfSource
from ckptool.formats.hf_sink import HfSink, layout
from ckptool.hub import Located, locate
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.selection import in_order_of, select_targets, untie_all
from ckptool.ops.consume import Consumer, check_consumable
from ckptool.ops.conversion import Execution, convert, work_of
from ckptool.ops.head_start import Copying, at_once, is_worth_it, with_head_start
from ckptool.ops.import_adapter import add_adapter, refuse_adapter_alone
from ckptool.ops.inputs import ModelInput, guess_input, open_input, weight_bytes
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.targets import check_disk, checked_dtype, chooser, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.storage.files import Place
from ckptool.storage.staging import is_being_written, refuse_existing
from ckptool.storage.store_path import StorePath

if TYPE_CHECKING:
    from ckptool.ranks import Ranks

MODEL_PREFIX = "model."
ENGINES = ("stream", "transformers")

#: What torch.save adds to a chunk: archive members and alignment; and what the metadata says of it.
CHUNK_OVERHEAD_BYTES = 1600

#: What `digests.json` says of a tensor or a file, generously.
DIGEST_RECORD_BYTES = 256
EXTRA_PIECE_BYTES = 32 << 20


def import_hf(
    src: str,
    name: str | None = None,
    *,
    root: Place | None = None,
    revision: str | None = None,
    local_cache: bool = False,
    dtype: str = "keep",
    adapter: str = "",
    chunk_bytes: int = 32 << 20,
    engine: str = "stream",
    untie: bool = False,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    consume: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    num_workers: int | None = None,
    memory_bytes: int | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Turn the Hugging Face model `src` (Hub id, folder, or one safetensors file) into the DCP checkpoint `name`.

    A Hub id is read straight from the Hub, or from the Hub's cache when it is there; `local_cache` downloads it to the
    cache first.

    Every tensor is stored under `model.<live parameter name>` in dim-0 chunks of at most `chunk_bytes`, tied tensors
    once. `dtype` is "keep" or a `core.dtypes.DTYPE_OPTIONS` key; floats only are cast. `engine` "stream" copies in
    constant memory, `num_workers` files at a time, as many as there are cores and as their buffers fit into
    `memory_bytes`; "transformers" loads the whole model through `from_pretrained`. `untie` stores tied tensors apart,
    and the config says so. `keys` and `exclude` are globs of the names in the checkpoint: only a part is imported.
    `adapter` is a folder or Hub id of a LoRA adapter that peft has saved: its matrices are stored beside the layers.
    `consume` deletes each safetensors file of the source once its bytes are safe in the checkpoint. `overwrite`
    replaces an existing target once the new one is safe on the disk, `resume` goes on from an interrupted attempt, and
    `ranks`, which all call this, share the work out. Raises a CkptoolError; the target then is as it was.
    """
    start = time.monotonic()
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
    if chunk_bytes < 1:
        raise UsageError("--chunk-size must be at least one byte")
    if consume and (keys or exclude or engine != "stream"):
        raise UsageError("--consume goes with a whole model and --engine stream")
    if engine != "stream" and (untie or keys or exclude):
        raise UsageError("--untie, --keys and --exclude go with --engine stream")
    if adapter and (consume or engine != "stream"):
        raise UsageError("--adapter goes with --engine stream, and not with --consume")
    cast = checked_dtype(dtype)
    is_downloaded = local_cache or engine == "transformers"
    located = locate(src, revision, local_cache=is_downloaded, show_progress=progress is not None)
    target = new_target(name or located.default_name, root)
    refuse_existing(target, overwrite)
    refuse_own_source(located.path, target)
    refuse_adapter_alone(located.path)
    if engine == "transformers":
        from ckptool.ops.import_reference import import_through_transformers

        return import_through_transformers(
            located, target, cast, overwrite=overwrite, dry_run=dry_run, progress=progress
        )

    how = Execution(overwrite, resume, progress, ranks)
    job = _Job(located, target, cast, chunk_bytes, untie, keys, exclude, consume, num_workers, memory_bytes, how)
    with contextlib.ExitStack() as opened:

        def make_plan() -> _Planned:
            model = open_input(located.path, cast)
            opened.enter_context(contextlib.closing(model.source))
            if adapter:
                model = add_adapter(model, adapter, cast, located.path)
                opened.enter_context(contextlib.closing(model.source))
            return _plan(job, model)

        guess = None if dry_run or adapter else _guess(job, opened)
        if guess is not None:
            planned, notes = with_head_start(guess, make_plan, _is_same_work, partial(_carry_out, job))
        else:
            planned = make_plan()
            if dry_run:
                _check_disk(job, planned)
                notes = []
            else:
                notes = _carry_out(job, planned, lambda: planned, at_once)
        notes = [*planned.notes, *notes]
        return Result("import-hf", str(target), planned.plan, not dry_run, time.monotonic() - start, tuple(notes))


@dataclasses.dataclass(frozen=True)
class _Job:
    """What to import, where to, and how."""

    located: Located
    target: Place
    cast: str | None
    chunk_bytes: int
    untie: bool
    keys: Sequence[str]
    exclude: Sequence[str]
    consume: bool
    num_workers: int | None
    memory_bytes: int | None
    how: Execution


@dataclasses.dataclass(frozen=True)
class _Planned:
    """All that is settled by planning."""

    model: ModelInput
    names: NamePlan
    plan: Plan
    consumer: Consumer | None
    notes: tuple[str, ...]


def _plan(job: _Job, model: ModelInput) -> _Planned:
    """Raises MismatchError when names don't fit."""
    source = model.source
    names = _settled(model.names, job.untie, job.keys, job.exclude)
    names = in_order_of(names, source.manifest.tensors)
    extra_bytes = sum(source.manifest.tensors[name].num_bytes for name in names.extra)
    num_records = len(source.manifest.tensors) + model.side.num_files
    plan = plan_conversion(
        "import-hf",
        source.manifest,
        names,
        str(job.target),
        cut=cut_tensor,
        piece_bytes=job.chunk_bytes,
        target_prefix=MODEL_PREFIX,
        extra_disk_bytes=extra_bytes + model.side.num_bytes + num_records * DIGEST_RECORD_BYTES,
        chunk_overhead_bytes=CHUNK_OVERHEAD_BYTES,
        lay_out=partial(dcp_parts, num_ranks=job.how.world_size),
        num_workers=job.num_workers,
        memory_bytes=job.memory_bytes,
    )
    aside = [f"kept aside, the model doesn't use them: {name_some(list(names.extra))}"] if names.extra else []
    notes = [*model.notes, *aside, *plan.notes]
    consumer = _consumer(source, names, plan, job.located, job.how) if job.consume else None
    if consumer:
        notes.append(f"--consume: {len(source.manifest.files)} files of {job.located.path} are deleted on the way")
    return _Planned(model, names, plan, consumer, tuple(notes))


def _check_disk(job: _Job, planned: _Planned) -> None:
    """Raises StorageError when the disk is too small."""
    freed_bytes = planned.consumer.freed_bytes(job.target) if planned.consumer else 0
    check_disk(job.target, planned.plan, freed_bytes, job.how.ranks)


def _guess(job: _Job, opened: contextlib.ExitStack) -> _Planned | None:
    """The plan for a model that keeps its names, where it can be begun with before it is known to be right."""
    is_plain = not (job.consume or job.untie or job.keys or job.exclude or job.how.ranks)
    # What an interrupted attempt left must not go for a guess.
    if not is_plain or is_being_written(job.target) or not is_worth_it(weight_bytes(job.located.path)):
        return None
    model = guess_input(job.located.path, job.cast)
    if model is None:
        return None
    opened.enter_context(contextlib.closing(model.source))
    return _plan(job, model)


def _is_same_work(one: _Planned, other: _Planned) -> bool:
    return work_of(one.plan) == work_of(other.plan)


def _carry_out(job: _Job, begun: _Planned, settled: Callable[[], _Planned], copying: Copying) -> list[str]:
    """Copy as `begun` says. What `settled` gives is the final word on everything but the parts."""
    # Not of what `settled` gives: by then the copy has filled the disk.
    _check_disk(job, begun)
    tensors = {entry.fqn: entry for item in begun.plan.items for entry in item.targets}
    paths: dict[str, tuple[str | int, ...]] = {}
    ties: dict[str, str] = {}
    notes: list[str] = []

    def put_beside(content: Path) -> None:
        planned = settled()
        names = planned.names
        ties.update({MODEL_PREFIX + alias: MODEL_PREFIX + canonical for alias, canonical in names.ties.items()})
        paths.update(model_paths([*tensors, *ties]))
        planned.model.side.write(content / "hf")
        if job.untie:
            notes.extend(match_config(content / "hf", None, None, untied=True))
        _keep_extra(content / "hf", planned.model.source, names)
        write_provenance(content, _provenance(job, planned.model, names))

    went_on = convert(
        begun.plan,
        begun.model.source,
        job.located.path,
        job.target,
        lambda content: DcpSink(content, tensors, paths, ties),
        dataclasses.replace(job.how, copying=copying),
        before=put_beside,
        consumer=begun.consumer,
        also=begun.model.also,
    )
    return [*notes, *went_on]


def _consumer(source: Source, names: NamePlan, plan: Plan, located: Located, how: Execution) -> Consumer:
    """What deletes the source; files with tensors that are read again when the import is planned anew come last."""
    if not isinstance(source, HfSource):
        raise UsageError("--consume works for safetensors files")
    folder = source.folder
    if isinstance(folder, StorePath):
        raise UsageError(
            f"--consume deletes files of this machine, and {folder} has none here",
            hint="import it without --consume: no copy of it is made",
        )
    check_consumable(folder, list(source.manifest.files), "repo" in located.origin, how.world_size)
    locators = (chunk.locator for name in names.extra for chunk in source.manifest.tensors[name].chunks)
    kept = {locator.file for locator in locators if locator is not None} | source.files_read
    return Consumer(folder, source.manifest, plan.parts, kept)


def _settled(names: NamePlan, untie: bool, keys: Sequence[str], exclude: Sequence[str]) -> NamePlan:
    """The plan as the options want it."""
    if untie:
        names = untie_all(names)
    if not keys and not exclude:
        return names
    is_chosen = chooser(keys, exclude)
    kept = tuple(name for name in names.extra if is_chosen(MODEL_PREFIX + name))
    names = dataclasses.replace(names, extra=kept)
    return select_targets(names, lambda name: is_chosen(MODEL_PREFIX + name))


def _keep_extra(folder: Path, source: Source, names: NamePlan) -> None:
    """Write the tensors that the model has no use for where an export will find them."""
    if not names.extra:
        return
    entries = {name: source.manifest.tensors[name] for name in names.extra}
    kept = keep_names({name: entry.shape for name, entry in entries.items()}, None, "")
    plan = plan_conversion(
        "import-hf",
        source.manifest,
        kept,
        str(folder),
        cut=stream_tensor,
        piece_bytes=EXTRA_PIECE_BYTES,
        lay_out=lambda items: one_part(layout(items), EXTRA_NAME),
    )
    folder.mkdir(exist_ok=True)
    sink = HfSink(folder, plan.parts)
    sink.finish(copy_engine.run(plan.parts, source, sink))


def model_paths(fqns: list[str]) -> dict[str, tuple[str | int, ...]]:
    """DCP's planner data for `{"model": {name: tensor}}`."""
    return {fqn: ("model", fqn.removeprefix(MODEL_PREFIX)) for fqn in fqns}


def _provenance(job: _Job, model: ModelInput, names: NamePlan) -> Provenance:
    origin = {**job.located.origin, "dtype": model.dtype}
    if model.quantisation:
        origin["quantization"] = model.quantisation
    return new_provenance(
        source=origin,
        naming=names.naming,
        ties=dict(names.ties),
        stored_tied_names=names.stored_tied_names,
        untied=dict(names.untied),
        adapter=dict(model.adapter),
        part={"keys": [*job.keys], "exclude": [*job.exclude]} if job.keys or job.exclude else {},
    )
