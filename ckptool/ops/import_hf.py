"""Hugging Face -> DCP, once, on one CPU process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from ckptool import engine as copy_engine
from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import cut_tensor, stream_tensor
from ckptool.core.interfaces import Progress
from ckptool.core.plan import Plan, Result
from ckptool.core.provenance import Provenance
from ckptool.errors import UsageError
from ckptool.formats.dcp_sink import DcpSink
from ckptool.formats.hf_config import main_dtype
from ckptool.formats.hf_folder import EXTRA_NAME, HfSink, HfSource, copy_side_files, side_files
from ckptool.hub import Located, locate
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.targets import check_disk, checked_dtype, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.storage.staging import refuse_existing, staged_directory

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
    root: Path | None = None,
    revision: str | None = None,
    dtype: str = "keep",
    chunk_bytes: int = 32 << 20,
    engine: str = "stream",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Turn the Hugging Face model `src` (Hub id, folder, or one safetensors file) into the DCP checkpoint `name`.

    Every tensor is stored under `model.<live parameter name>` in dim-0 chunks of at most `chunk_bytes`, tied tensors
    once. `dtype` is "keep" or a `core.dtypes.DTYPE_OPTIONS` key; floats only are cast. `engine` "stream" copies in
    constant memory, "transformers" loads the whole model through `from_pretrained`. `overwrite` replaces an existing
    target once the new one is safe on the disk. Raises a CkptoolError; the target then is as it was.
    """
    start = time.monotonic()
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
    if chunk_bytes < 1:
        raise UsageError("--chunk-size must be at least one byte")
    cast = checked_dtype(dtype)
    located = locate(src, revision)
    target = new_target(name or located.default_name, root)
    refuse_existing(target, overwrite)
    refuse_own_source(located.path, target)
    if engine == "transformers":
        from ckptool.ops.import_reference import import_through_transformers

        return import_through_transformers(
            located, target, cast, overwrite=overwrite, dry_run=dry_run, progress=progress
        )

    with contextlib.closing(HfSource(located.path)) as source:
        names = name_tensors(located.path, source, cast)
        side = side_files(source.folder)
        extra_bytes = sum(source.manifest.tensors[name].num_bytes for name in names.extra)
        side_bytes = sum((source.folder / file).stat().st_size for file in side)
        num_records = len(source.manifest.tensors) + len(side)
        plan = plan_conversion(
            "import-hf",
            source.manifest,
            names,
            str(target),
            cut=cut_tensor,
            piece_bytes=chunk_bytes,
            target_prefix=MODEL_PREFIX,
            extra_disk_bytes=extra_bytes + side_bytes + num_records * DIGEST_RECORD_BYTES,
            chunk_overhead_bytes=CHUNK_OVERHEAD_BYTES,
        )
        notes = (*source.notes, *plan.notes)
        check_disk(target, plan)
        if dry_run:
            return Result("import-hf", str(target), plan, False, time.monotonic() - start, notes)
        with staged_directory(target, overwrite) as staging:
            copy_side_files(source.folder, staging / "hf", side)
            _keep_extra(staging / "hf", source, names)
            write_provenance(staging, _provenance(located, source.manifest, names))
            sink = _open_sink(staging, plan, names)
            copy_engine.run(plan, source, sink, progress(plan) if progress else None)
    return Result("import-hf", str(target), plan, True, time.monotonic() - start, notes)


def name_tensors(path: Path, source: HfSource, cast: str | None) -> NamePlan:
    from ckptool.naming.meta_model import build_meta_model, is_custom_code, read_config

    config = read_config(source.folder, len(source.manifest.tensors), source.manifest.num_bytes)
    shapes = {name: entry.shape for name, entry in source.manifest.tensors.items()}
    if config is None:
        return keep_names(shapes, cast, f"no config.json beside {path.name}: tensors keep their names")
    if is_custom_code(config):
        note = "the model is the repository's own code, which is not run: tensors keep their names"
        return keep_names(shapes, cast, note)
    from ckptool.naming.transformers_names import plan_import

    model = build_meta_model(source.folder, cast)
    return plan_import(model, source.manifest.tensors, cast, lambda a, b: _same_bytes(source, a, b))


def _same_bytes(source: HfSource, a: str, b: str, piece_bytes: int = 16 << 20) -> bool:
    """Compare two stored tensors piece by piece."""
    one, other = source.manifest.tensors[a], source.manifest.tensors[b]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows = max(1, piece_bytes // max(1, one.num_bytes // max(1, one.shape[0] if one.shape else 1)))
    for box in Box.whole(one.shape).split_rows(rows):
        first, second = (bytearray(box.num_elements * one.itemsize_bytes) for _ in range(2))
        source.read_into(a, box, memoryview(first))
        source.read_into(b, box, memoryview(second))
        if first != second:
            return False
    return True


def _open_sink(staging: Path, plan: Plan, names: NamePlan) -> DcpSink:
    tensors = {entry.fqn: entry for item in plan.items for entry in item.targets}
    ties = {MODEL_PREFIX + alias: MODEL_PREFIX + canonical for alias, canonical in names.ties.items()}
    return DcpSink(staging, tensors, model_paths([*tensors, *ties]), ties)


def _keep_extra(folder: Path, source: HfSource, names: NamePlan) -> None:
    """Write the tensors that the model has no use for where an export will find them."""
    if not names.extra:
        return
    entries = {name: source.manifest.tensors[name] for name in names.extra}
    kept = keep_names({name: entry.shape for name, entry in entries.items()}, None, "")
    plan = plan_conversion(
        "import-hf", source.manifest, kept, str(folder), cut=stream_tensor, piece_bytes=EXTRA_PIECE_BYTES
    )
    folder.mkdir(exist_ok=True)
    copy_engine.run(plan, source, HfSink(folder, {EXTRA_NAME: list(entries.values())}))


def model_paths(fqns: list[str]) -> dict[str, tuple[str | int, ...]]:
    """DCP's planner data for `{"model": {name: tensor}}`."""
    return {fqn: ("model", fqn.removeprefix(MODEL_PREFIX)) for fqn in fqns}


def _provenance(located: Located, source: Manifest, names: NamePlan) -> Provenance:
    origin = {**located.origin, "dtype": main_dtype(source.tensors.values())}
    return new_provenance(
        source=origin,
        naming=names.naming,
        ties=dict(names.ties),
        stored_tied_names=names.stored_tied_names,
        untied=dict(names.untied),
    )
