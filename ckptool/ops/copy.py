"""A checkpoint under another name: copied, read back from the disk and compared before it is published."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import cut_tensor
from ckptool.core.interfaces import Progress
from ckptool.core.parts import FileRecord
from ckptool.core.plan import Plan, Result
from ckptool.errors import DamagedError, NotFoundError, StorageError
from ckptool.formats.dcp_metadata import METADATA_FILE, MODEL_PREFIX, read_manifest
from ckptool.formats.dcp_sink import dcp_parts
from ckptool.naming.groups import keep_names
from ckptool.ops.checks.stored_bytes import check_bytes
from ckptool.ops.checks.structure import check_structure
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.targets import check_disk, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.runs import resolve
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, FileDigest, read_digests
from ckptool.storage.files import Place, open_binary, os_errors, safe_join
from ckptool.storage.hashing import HashingFile
from ckptool.storage.place import file_version, files_below
from ckptool.storage.staging import refuse_existing, staged_directory
from ckptool.storage.store_path import StorePath
from ckptool.storage.upload import MARKERS, Upload

_PIECE_BYTES = 8 << 20
_NUM_UPLOADS = 4
_CHUNK_BYTES = 32 << 20
_CHUNK_OVERHEAD_BYTES = 1600


def copy(
    name: str,
    target_name: str,
    *,
    root: Place | None = None,
    model_only: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Copy checkpoint `name` to `target_name` (a path, or a name under `root`), and read back what was written.

    Every file is compared with the source's `digests.json` while it is read, and with itself when it is read back.
    `model_only` writes a new checkpoint of `model.*` instead, without optimizer state, objects and data position.
    Hidden files but `.metadata` are left behind. Raises DamagedError when the source isn't what was written,
    StorageError when the copy can't be written or doesn't read back; the target then is as it was.
    """
    start = time.monotonic()
    path = resolve(name, root)
    target = new_target(target_name, root, may_be_step=True)
    refuse_existing(target, overwrite)
    refuse_own_source(path, target)
    if model_only:
        plan = _copy_model(path, target, overwrite, dry_run, progress)
    else:
        plan = _copy_folder(path, target, overwrite, dry_run, progress)
    return Result("copy", str(target), plan, not dry_run, time.monotonic() - start, plan.notes)


def _copy_folder(
    path: Place, target: Place, overwrite: bool, dry_run: bool, progress: Callable[[Plan], Progress] | None
) -> Plan:
    manifest = read_manifest(path)
    digests = read_digests(path, manifest.save_id)
    listed = digests.files if digests else {}
    last = [name for name in (DIGESTS_FILE, METADATA_FILE) if (path / name).exists()]
    names = [*sorted((set(files_below(path)) | set(listed)) - set(last)), *last]
    with os_errors(path):
        num_bytes = sum(safe_join(path, name).stat().st_size for name in names)
    plan = Plan("copy", str(path), str(target), (), num_bytes, num_bytes, _PIECE_BYTES, num_bytes)
    check_disk(target, plan)
    if dry_run:
        return plan
    report = progress(plan) if progress else None
    if isinstance(target, StorePath):
        _copy_into_store(path, target, names, listed, overwrite, report)
    else:
        with staged_directory(target, overwrite) as staging:
            for name in names:
                copy_file(path, staging, name, listed.get(name), report)
    return plan


def _copy_into_store(
    path: Place,
    target: StorePath,
    names: Sequence[str],
    listed: Mapping[str, FileDigest],
    overwrite: bool,
    report: Progress | None,
) -> None:
    """Bring up a few files at a time; those of an interrupted attempt that are there already are left out."""
    versions = [(name, file_version(safe_join(path, name))) for name in names]
    key = blake3(repr([str(path), versions]).encode()).hexdigest()
    upload = Upload(target, overwrite)
    try:
        done = upload.begin(key)

        def bring(name: str) -> None:
            digest = copy_file(path, upload.content, name, listed.get(name), report)
            if name not in MARKERS:
                upload.keep(FileRecord(name, digest.num_bytes, digest.blake3), key)

        with ThreadPoolExecutor(_NUM_UPLOADS, "copy") as workers:
            for _ in workers.map(bring, [name for name in names if name not in done]):
                pass
        upload.publish()
    finally:
        upload.discard()


def copy_file(
    source: Place, target: Path, name: str, recorded: FileDigest | None, report: Progress | None
) -> FileDigest:
    """Copy one file, flush it, and compare what the disk gives back with what was read; its digest."""
    origin, copied = safe_join(source, name), target / name
    with os_errors(copied):
        copied.parent.mkdir(parents=True, exist_ok=True)
        with open_binary(origin, in_order=True) as opened, contextlib.closing(HashingFile(copied)) as writer:
            reader: Any = opened
            buffer = memoryview(bytearray(_PIECE_BYTES))
            while count := reader.readinto(buffer):
                writer.write(buffer[:count])
                if report:
                    report(count)
            digest = writer.digest()
        _drop_from_cache(copied)
    if recorded is not None and digest != recorded:
        raise DamagedError(
            f"{origin} is not what {DIGESTS_FILE} lists: it changed after it was written",
            hint=f"ckptool verify {source} tells where",
        )
    if digest_file(copied) != digest.blake3:
        raise StorageError(f"{copied} does not read back as it was written", hint="the disk may be failing")
    return digest


def _drop_from_cache(path: Path) -> None:
    """Make reading a file back ask the disk."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _copy_model(
    path: Place, target: Place, overwrite: bool, dry_run: bool, progress: Callable[[Plan], Progress] | None
) -> Plan:
    from ckptool import engine
    from ckptool.formats.dcp_sink import DcpSink
    from ckptool.formats.dcp_source import DcpSource

    with contextlib.closing(DcpSource(path)) as source:
        manifest = source.manifest
        ties = _model_ties(manifest)
        plan = _plan_model(path, target, manifest, ties)
        check_disk(target, plan)
        if dry_run:
            return plan
        with staged_directory(target, overwrite) as staging:
            for name in _hf_files(path):
                copy_file(path, staging, name, None, None)
            _write_model_provenance(staging, manifest)
            tensors = {entry.fqn: entry for item in plan.items for entry in item.targets}
            paths = {f: manifest.paths.get(f, ("model", f.removeprefix(MODEL_PREFIX))) for f in (*tensors, *ties)}
            sink = DcpSink(staging, tensors, paths, ties)
            report = progress(plan) if progress else None
            sink.finish(engine.run(plan.parts, source, sink, report, num_workers=plan.num_workers))
            _check_model(staging, read_digests(path, manifest.save_id))
    return plan


def _model_ties(manifest: Manifest) -> dict[str, str]:
    """The ties between names of the model; a name tied to something else is copied as a tensor of its own."""
    return {a: c for a, c in manifest.ties.items() if a.startswith(MODEL_PREFIX) and c.startswith(MODEL_PREFIX)}


def _plan_model(path: Place, target: Place, manifest: Manifest, ties: dict[str, str]) -> Plan:
    shapes = {f: e.shape for f, e in manifest.tensors.items() if f.startswith(MODEL_PREFIX) and f not in ties}
    if not shapes:
        raise NotFoundError(
            f"{path} has no `model.*` tensors to copy", hint=f"ckptool inspect {path} shows what it holds"
        )
    return plan_conversion(
        "copy",
        manifest,
        dataclasses.replace(keep_names(shapes, None, ""), notes=()),
        str(target),
        cut=cut_tensor,
        piece_bytes=_CHUNK_BYTES,
        lay_out=dcp_parts,
        extra_disk_bytes=sum((path / name).stat().st_size for name in _hf_files(path)),
        chunk_overhead_bytes=_CHUNK_OVERHEAD_BYTES,
    )


def _hf_files(path: Place) -> list[str]:
    return [f"hf/{name}" for name in files_below(path / "hf")]


def _write_model_provenance(staging: Path, manifest: Manifest) -> None:
    """Where it comes from stays; who wrote it is this process."""
    if manifest.provenance is None:
        return
    writer = new_provenance()
    provenance = dataclasses.replace(
        manifest.provenance,
        tool_version=writer.tool_version,
        created=writer.created,
        libraries=writer.libraries,
        world_size=1,
        mesh={},
    )
    write_provenance(staging, provenance)


def _check_model(staging: Path, source_digests: Digests | None) -> None:
    """Read the new checkpoint back from the disk, and compare its tensors with what the source recorded of them."""
    for file in staging.rglob("*"):
        if file.is_file():
            with os_errors(file):
                _drop_from_cache(file)
    structure = check_structure(staging)
    findings = list(structure.findings)
    if structure.manifest is not None:
        findings += check_bytes(staging, structure.manifest, structure.digests).findings
    if findings:
        raise StorageError(
            f"{staging} does not read back as it was written: {findings[0].message}", hint="the disk may be failing"
        )
    recorded = source_digests.tensors if source_digests else {}
    for fqn, made in structure.digests.tensors.items() if structure.digests else ():
        if fqn in recorded and recorded[fqn] != made:
            raise DamagedError(f"tensor {fqn} is not what the source's {DIGESTS_FILE} lists")
