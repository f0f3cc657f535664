"""DCP -> Hugging Face safetensors, or the single .pt file, streamed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import stream_tensor
from ckptool.core.interfaces import Progress
from ckptool.core.parts import Part
from ckptool.core.plan import Plan, Result
from ckptool.core.provenance import Provenance
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, NotFoundError, UsageError
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.hf_config import main_dtype, match_config
from ckptool.formats.hf_folder import copy_side_files
from ckptool.formats.hf_sink import HfSink, hf_parts
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.selection import select_sources, untie_all
from ckptool.ops.conversion import Execution, convert
from ckptool.ops.inputs import same_bytes
from ckptool.ops.model_source import ConfigFolder, ModelSource, find_config
from ckptool.ops.targets import check_disk, checked_dtype, chooser, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.runs import resolve
from ckptool.storage.staging import refuse_existing, staged_directory, staged_file

if TYPE_CHECKING:
    from ckptool.ranks import Ranks

MODEL_PREFIX = "model."
ENGINES = ("stream", "torch")
PIECE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class HfExport:
    """What an export to Hugging Face works from: the checkpoint, its side files and the wanted dtype."""

    path: Path
    target: Path
    manifest: Manifest
    live: Mapping[str, TensorEntry]
    cast: str | None
    max_shard_bytes: int
    extra: frozenset[str]
    config: ConfigFolder
    untie: bool = False

    @property
    def provenance(self) -> Provenance | None:
        return self.manifest.provenance


def export(
    name: str,
    *,
    to: str = "hf",
    out: Path | None = None,
    dtype: str = "keep",
    max_shard_bytes: int = 5_000_000_000,
    engine: str = "stream",
    config: str = "",
    untie: bool = False,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    root: Path | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    num_workers: int | None = None,
    memory_bytes: int | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Write the model of checkpoint `name` as a Hugging Face folder (`to="hf"`), or all of it as a .pt file ("torch").

    The default `out` is beside the checkpoint: `NAME-hf` or `NAME.pt`. `engine` "stream" copies in constant memory,
    `num_workers` files at a time, as many as there are cores and as their buffers fit into `memory_bytes`; "torch"
    takes `dcp_to_torch_save` and holds everything. `config` is a Hugging Face folder or Hub id that has the model's
    config and tokenizer, for checkpoints that have none. `untie` stores tied tensors under each of their names, and the
    config says so (hf only). `keys` and `exclude` are globs of the checkpoint's names: only a part is exported.
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
    path = resolve(name, root)
    if to == "torch":
        if cast or untie:
            raise UsageError("--dtype and --untie go with --to hf: the .pt file holds what the checkpoint holds")
        target = (out or path.parent / f"{path.name}.pt").absolute()
        plan = _to_torch(path, target, engine, is_chosen, how, dry_run)
        return Result("export", str(target), plan, not dry_run, time.monotonic() - start, plan.notes)
    if to != "hf":
        raise UsageError(f"--to {to}: choose hf or torch")
    target = (out or path.parent / f"{path.name}-hf").absolute()
    refuse_existing(target, how.overwrite)
    refuse_own_source(path, target)
    with contextlib.closing(ModelSource(path)) as source:
        job = _hf_job(path, target, source, cast, max_shard_bytes, untie, config)
        names = _name_tensors(job, source)
        if keys or exclude:
            names = select_sources(names, lambda name: is_chosen(source.stored_name(name)))
        plan = _plan_hf(job, names, num_workers, memory_bytes)
        check_disk(target, plan)
        notes = [*source.notes, *([job.config.note] if job.config.note else []), *plan.notes]

        def put_beside(content: Path) -> None:
            notes.extend(_finish_folder(job, content, plan, names))

        if engine == "torch" and job.provenance is None and not source.is_plain:
            raise UsageError(f"--engine torch knows names like model.*, not those of {path}")
        if not dry_run and engine == "torch":
            from ckptool.ops.export_reference import export_through_torch

            with staged_directory(target, how.overwrite) as staging:
                export_through_torch(job, staging, how.progress(plan) if how.progress else None)
                put_beside(staging)
        elif not dry_run:
            notes += convert(plan, source, path, lambda content: HfSink(content, plan.parts), how, after=put_beside)
    return Result("export", str(target), plan, not dry_run, time.monotonic() - start, tuple(notes))


def _hf_job(
    path: Path,
    target: Path,
    source: ModelSource,
    cast: str | None,
    max_shard_bytes: int,
    untie: bool,
    config: str,
) -> HfExport:
    manifest = source.manifest
    live = {f.removeprefix(MODEL_PREFIX): e for f, e in manifest.tensors.items()}
    chosen = {fqn: dataclasses.replace(entry, fqn=fqn) for fqn, entry in live.items()}
    if not untie:
        chosen = _choose_tied(chosen, manifest)
    folder = find_config(path, config)
    return HfExport(path, target, manifest, chosen, cast, max_shard_bytes, source.extra, folder, untie)


def _choose_tied(live: Mapping[str, TensorEntry], manifest: Manifest) -> dict[str, TensorEntry]:
    """One name per tie, unless the source stored more: then the same ones as there."""
    provenance = manifest.provenance
    ties = {a.removeprefix(MODEL_PREFIX): c.removeprefix(MODEL_PREFIX) for a, c in manifest.ties.items()}
    stored = set(provenance.stored_tied_names) if provenance else set()
    chosen = dict(live)
    for canonical in set(ties.values()):
        names = {canonical, *(alias for alias, target in ties.items() if target == canonical)}
        keep = names & stored or {canonical}
        for fqn in names - keep:
            chosen.pop(fqn, None)
    return chosen


def _plan_hf(job: HfExport, names: NamePlan, num_workers: int | None, memory_bytes: int | None) -> Plan:
    return plan_conversion(
        "export",
        job.manifest,
        names,
        str(job.target),
        cut=stream_tensor,
        piece_bytes=PIECE_BYTES,
        source_prefix=MODEL_PREFIX,
        extra_disk_bytes=job.config.num_bytes,
        lay_out=partial(hf_parts, max_shard_bytes=job.max_shard_bytes),
        num_workers=num_workers,
        memory_bytes=memory_bytes,
    )


def _name_tensors(job: HfExport, source: ModelSource) -> NamePlan:
    from ckptool.naming.composition import compose, made_entries
    from ckptool.naming.dialects import find_dialect
    from ckptool.naming.meta_model import build_meta_model, is_custom_code, read_config

    shapes = {fqn: entry.shape for fqn, entry in job.live.items()}
    config = read_config(job.config.path, len(job.live), sum(entry.num_bytes for entry in job.live.values()))
    if config is None:
        if job.provenance and job.provenance.naming and job.provenance.naming.transforms:
            raise DamagedError(
                f"{job.config.path} has no config.json, without which the Hub's names can't be made",
                hint="put the model's config.json there",
                kind="missing",
            )
        if dialect := find_dialect(job.live):
            raise NotFoundError(
                f"{job.path} has the names of {dialect.name}, and no config.json says which model it is",
                hint="--config HF_FOLDER_OR_ID names a Hugging Face model like it",
            )
        return keep_names(shapes, job.cast, "no hf/config.json in the checkpoint: tensors keep their names, no config")
    if is_custom_code(config):
        return keep_names(shapes, job.cast, "the model is the repository's own code: tensors keep their names")
    from ckptool.naming.live_names import plan_live
    from ckptool.naming.transformers_names import plan_export

    model = build_meta_model(job.config.path, job.cast)
    if job.provenance is None:
        first = plan_live(model, job.live, lambda a, b: same_bytes(source, MODEL_PREFIX + a, MODEL_PREFIX + b))
        first = untie_all(first) if job.untie else first
        return compose(first, plan_export(model, made_entries(first, job.live), None, job.cast))
    live = {fqn: entry for fqn, entry in job.live.items() if fqn not in job.extra}
    names = plan_export(model, live, job.provenance, job.cast)
    extra = keep_names({fqn: job.live[fqn].shape for fqn in job.extra}, None, "")
    return dataclasses.replace(names, groups=(*names.groups, *extra.groups))


def _finish_folder(job: HfExport, staging: Path, plan: Plan, names: NamePlan) -> list[str]:
    """Side files beside the tensors, and a config that agrees with them."""
    copy_side_files(job.config.path, staging, job.config.side)
    written = [entry for item in plan.items for entry in item.targets]
    provenance = job.provenance
    source_dtype = provenance.source.get("dtype") if provenance else None
    untied = bool(job.untie or names.untied or (provenance and provenance.untied))
    quantised = provenance.source.get("quantization") if provenance else None
    notes = [f"the source was quantised with {quantised}; these weights are not"] if quantised else []
    return notes + match_config(staging, main_dtype(written), source_dtype, untied)


def _to_torch(
    path: Path, target: Path, engine: str, is_chosen: Callable[[str], bool], how: Execution, dry_run: bool
) -> Plan:
    from ckptool.formats.torch_file import TorchFileSink

    refuse_existing(target, how.overwrite, is_file=True)
    refuse_own_source(path, target)
    with contextlib.closing(DcpSource(path)) as source:
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
        check_disk(target, plan)
        if dry_run:
            return plan
        if engine == "torch":
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            with staged_file(target, how.overwrite) as staging:
                # Its raw unpickling of .metadata is safe here: DcpSource has read the same file by the allow-list.
                dcp_to_torch_save(path, staging)
        else:
            how = dataclasses.replace(how, is_file=True)
            convert(plan, source, path, lambda content: TorchFileSink(content, manifest), how)
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
