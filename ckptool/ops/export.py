"""DCP -> Hugging Face safetensors, another trainer's DCP, or the single .pt file, streamed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import stream_tensor
from ckptool.core.interfaces import Progress
from ckptool.core.parts import Part
from ckptool.core.plan import Plan, Result
from ckptool.errors import NotFoundError, TargetExistsError, UsageError
from ckptool.naming.dialects import dialect_names, load_dialect
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.selection import select_sources
from ckptool.ops.adapters import MergedSource, find_base, read_adapter, refuse_adapter
from ckptool.ops.conversion import Execution, convert, work_of
from ckptool.ops.export_adapter import AdapterForm
from ckptool.ops.export_dialect import DialectForm
from ckptool.ops.export_hf import HfForm
from ckptool.ops.export_job import PIECE_BYTES, Form, open_job
from ckptool.ops.head_start import Copying, at_once, is_worth_it, with_head_start
from ckptool.ops.model_card import read_origin
from ckptool.ops.model_source import ModelSource
from ckptool.ops.push import Push, PushTarget, push_details
from ckptool.ops.stored import find_stored, open_stored
from ckptool.ops.targets import check_disk, checked_dtype, chooser, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.storage.files import Place
from ckptool.storage.place import local_path
from ckptool.storage.staging import is_being_written, refuse_existing, staged_directory, staged_file

if TYPE_CHECKING:
    from ckptool.ranks import Ranks

ENGINES = ("stream", "torch")
ADAPTER_FORMS = ("folder", "merge")


def export(
    name: str,
    *,
    to: str = "hf",
    out: Place | None = None,
    dtype: str = "keep",
    max_shard_bytes: int = 5_000_000_000,
    engine: str = "stream",
    config: str = "",
    adapter: str = "",
    base: str = "",
    lora_alpha: float | None = None,
    untie: bool = False,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    push: PushTarget | None = None,
    root: Place | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    num_workers: int | None = None,
    memory_bytes: int | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Write the model of checkpoint `name`, which may be any trainer's, as a Hugging Face folder (`to="hf"`) or as
    another trainer's DCP checkpoint ("torchtitan", ...); or all of it as a .pt file ("torch").

    The default `out` is beside it: `NAME-hf` or `NAME.pt`. `engine` "stream" copies in constant memory, `num_workers`
    files at a time, as many as there are cores and as their buffers fit into `memory_bytes`; "torch"
    takes `dcp_to_torch_save` and holds everything. `config` is a Hugging Face folder or Hub id that has the model's
    config and tokenizer, for checkpoints that have none. `adapter` "folder" writes the checkpoint's LoRA adapter alone,
    for peft, "merge" the model with it added to the weights of the checkpoint `base` (default: the one it was trained
    on); `lora_alpha` is needed where the checkpoint doesn't say it. `untie` stores tied tensors under each of their
    names, and the config says so (hf only). `keys` and `exclude` are globs of the checkpoint's names: only a part is
    exported. `push` brings the folder to a repository of the Hub, too, before it appears as `out` (hf only).
    `overwrite` replaces an existing `out` once the new one is safe on the disk, `resume` goes on from an interrupted
    attempt, and `ranks`, which all call this, share the work out. Raises a CkptoolError; `out` then is as it was.
    """
    start = time.monotonic()
    how = Execution(overwrite, resume, progress, ranks)
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
    if max_shard_bytes < 1:
        raise UsageError("--max-shard-size must be at least one byte")
    if engine != "stream" and (keys or exclude):
        raise UsageError("--keys and --exclude go with --engine stream")
    cast = checked_dtype(dtype)
    is_chosen = chooser(keys, exclude)
    path = find_stored(name, root)
    if to == "torch":
        if cast or untie:
            raise UsageError("--dtype and --untie go with --to hf: the .pt file holds what the checkpoint holds")
        target = _target(path, out, ".pt")
        plan = _to_torch(path, target, engine, is_chosen, how, dry_run)
        return Result("export", str(target), plan, not dry_run, time.monotonic() - start, plan.notes, {"push": None})
    if to not in ("hf", *dialect_names()):
        raise UsageError(f"--to {to}: choose hf, torch or {', '.join(dialect_names())}")
    if to != "hf" and (untie or engine != "stream"):
        raise UsageError("--untie and --engine torch go with --to hf")
    if adapter not in ("", *ADAPTER_FORMS) or (adapter and engine != "stream") or (adapter == "folder" and to != "hf"):
        raise UsageError("an adapter is written as a folder for peft, or merged; with --engine stream")
    target = _target(path, out, f"-{'adapter' if adapter == 'folder' else to}")
    try:
        refuse_existing(target, how.overwrite)
    except TargetExistsError as error:
        if push is not None:
            error.hint = f"ckptool push {target} {push.repo} brings what is there to the Hub"
        raise
    refuse_own_source(path, target)
    if push is not None and (to != "hf" or engine != "stream" or not isinstance(target, Path)):
        raise UsageError("--push goes with --to hf, --engine stream and a local --out")
    pushing = _open_push(push, path, how) if push is not None else None
    sent = push_details(pushing)

    def upload(content: Path) -> None:
        if pushing is not None:
            pushing.upload(content)
            sent.update(push_details(pushing))

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(ModelSource(path)))
        lora = read_adapter(source, lora_alpha) if adapter else None
        also: tuple[str, ...] = ()
        if adapter == "merge" and lora is not None:
            path = find_base(path, source, lora, base, root)
            refuse_own_source(path, target)
            merged = MergedSource(path, lora, source, config)
            also = merged.versions()
            source = stack.enter_context(contextlib.closing(merged))
        elif adapter != "folder":
            refuse_adapter(source)
        job = open_job(
            path,
            target,
            source,
            config,
            untie,
            cast=cast,
            max_shard_bytes=max_shard_bytes,
            num_ranks=how.world_size,
            num_workers=num_workers,
            memory_bytes=memory_bytes,
        )
        form: Form = HfForm(job) if to == "hf" else DialectForm(job, load_dialect(to))
        if adapter == "folder" and lora is not None:
            form = AdapterForm(job, lora)

        def planned(names: NamePlan) -> _Planned:
            if keys or exclude:
                names = select_sources(names, lambda name: is_chosen(source.stored_name(name)))
            return _Planned(names, form.plan(names))

        def make_plan() -> _Planned:
            return planned(form.name_tensors())

        def carry_out(begun: _Planned, settled: Callable[[], _Planned], copying: Copying) -> list[str]:
            # Not of what `settled` gives: by then the copy has filled the disk.
            check_disk(target, begun.plan, ranks=ranks)
            beside: list[str] = []

            def put_beside(content: Path) -> None:
                final = settled()
                beside.extend(form.put_beside(content, final.plan, final.names))

            notes = convert(
                begun.plan,
                source,
                path,
                target,
                lambda content: form.open_sink(content, begun.plan, begun.names),
                dataclasses.replace(how, copying=copying),
                before=put_beside,
                after=upload,
                also=also,
            )
            return [*beside, *notes]

        if engine == "torch" and job.provenance is None and not source.is_plain:
            raise UsageError(f"--engine torch knows names like model.*, not those of {path}")
        notes: list[str] = []
        may_guess = engine == "stream" and not dry_run and not (ranks or also) and is_worth_it(job.manifest.num_bytes)
        likely = form.likely_names() if may_guess and not is_being_written(target) else None
        if likely is not None:
            final, notes = with_head_start(planned(likely), make_plan, _is_same_work, carry_out)
        else:
            final = make_plan()
            if dry_run:
                check_disk(target, final.plan, ranks=ranks)
            elif engine == "stream":
                notes = carry_out(final, lambda: final, at_once)
            else:
                check_disk(target, final.plan, ranks=ranks)
                from ckptool.ops.export_reference import export_through_torch

                with staged_directory(target, how.overwrite) as staging:
                    export_through_torch(job, staging, how.progress(final.plan) if how.progress else None)
                    notes = form.put_beside(staging, final.plan, final.names)
        notes = [*source.notes, *job.config.notes, *final.plan.notes, *notes]
    return Result("export", str(target), final.plan, not dry_run, time.monotonic() - start, tuple(notes), details=sent)


@dataclasses.dataclass(frozen=True)
class _Planned:
    names: NamePlan
    plan: Plan


def _is_same_work(one: _Planned, other: _Planned) -> bool:
    return work_of(one.plan) == work_of(other.plan)


def _open_push(push: PushTarget, path: Place, how: Execution) -> Push:
    """A push of what `path` is exported to, once it is known that nothing is in its way."""

    def look() -> Push:
        show_progress = how.progress is not None
        return Push(push, overwrite=how.overwrite, origin=read_origin(path), show_progress=show_progress)

    return how.ranks.on_first("push", look) if how.ranks else look()


def _target(path: Place, out: Place | None, ending: str) -> Place:
    return (path.parent / f"{path.name}{ending}" if out is None else out).absolute()


def _to_torch(
    path: Place, target: Place, engine: str, is_chosen: Callable[[str], bool], how: Execution, dry_run: bool
) -> Plan:
    from ckptool.formats.torch_file import TorchFileSink

    refuse_existing(target, how.overwrite, is_file=True)
    refuse_own_source(path, target)
    with contextlib.closing(open_stored(path)) as source:
        manifest = _part(source.manifest, is_chosen)
        names = keep_names({fqn: entry.shape for fqn, entry in manifest.tensors.items()}, None, "")
        plan = plan_conversion(
            "export",
            manifest,
            dataclasses.replace(names, notes=()),
            str(target),
            cut=stream_tensor,
            piece_bytes=PIECE_BYTES,
            lay_out=lambda items: [Part((target.name,), tuple(items), tuple(manifest.objects))],
        )
        check_disk(target, plan, ranks=how.ranks)
        if dry_run:
            return plan
        if engine == "torch":
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            with staged_file(target, how.overwrite) as staging:
                # Its raw unpickling of .metadata is safe here: DcpSource has read the same file by the allow-list.
                dcp_to_torch_save(local_path(path, "--engine torch"), staging)
        else:
            how = dataclasses.replace(how, is_file=True)
            convert(plan, source, path, target, lambda content: TorchFileSink(content, manifest), how)
    return plan


def _part(manifest: Manifest, is_chosen: Callable[[str], bool]) -> Manifest:
    """The chosen tensors and objects. Raises NotFoundError when there are none."""
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if is_chosen(fqn)}
    objects = {fqn: entry for fqn, entry in manifest.objects.items() if is_chosen(fqn)}
    if not tensors and not objects:
        raise NotFoundError(
            f"{manifest.location}: nothing to export with these --keys and --exclude",
            hint=f"ckptool inspect {manifest.location} shows the names",
        )
    return dataclasses.replace(manifest, tensors=tensors, objects=objects)
