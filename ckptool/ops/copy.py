"""A checkpoint under another name: copied, read back from the disk and compared before it is published."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import cut_tensor
from ckptool.core.interfaces import Progress
from ckptool.core.interruption import raise_if_interrupted
from ckptool.core.parts import FileRecord
from ckptool.core.plan import Plan, Result
from ckptool.errors import DamagedError, StorageError
from ckptool.formats.dcp_metadata import METADATA_FILE, is_checkpoint, parse_manifest
from ckptool.formats.dcp_sink import dcp_parts
from ckptool.formats.sharded_safetensors import SIDE_FOLDER
from ckptool.naming.groups import keep_names
from ckptool.naming.sections import model_only_notes, only_model
from ckptool.ops.checks.stored_bytes import check_bytes
from ckptool.ops.checks.structure import check_structure
from ckptool.ops.conversion import Execution, convert, leave
from ckptool.ops.model_source import find_config
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.side_files_kept import check_none_missing
from ckptool.ops.stored import find_stored, open_stored, read_stored, source_notes, stored_notes
from ckptool.ops.targets import check_disk, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, FileDigest, read_digests
from ckptool.storage.files import Place, open_binary, os_errors, safe_join
from ckptool.storage.hashing import HashingFile
from ckptool.storage.journal import Journal
from ckptool.storage.kept_files import kept_files, remove_rest
from ckptool.storage.place import file_version, files_below
from ckptool.storage.rate_limit import RateLimit
from ckptool.storage.staging import Staging, create_staging, refuse_existing
from ckptool.storage.store_path import StorePath
from ckptool.storage.upload import MARKERS, NUM_UPLOADS, Upload

_PIECE_BYTES = 8 << 20
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
    max_bytes_per_s: float = 0.0,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Copy checkpoint `name` to `target_name` (a path, or a name under `root`), and read back what was written.

    Every file is compared with the source's `digests.json`, where there is one, while it is read, and with itself when
    it is read back.
    `model_only` writes a new checkpoint of the model instead, without optimizer state, objects and data position; DCP
    in safetensors that holds nothing else is copied as it is.
    An attempt that fails or is killed leaves its finished files for the next one. With `max_bytes_per_s` no more than
    that is read, and no more is sent to a store or read back from it. Hidden files but `.metadata` are left behind; of
    DCP in safetensors `.hf_metadata/` is taken along.

    Raises DamagedError when the source isn't what was written, MismatchError when DCP in safetensors doesn't have the
    shapes of the config beside it, StorageError when the copy can't be written or doesn't read back; the target then is
    as it was.
    """
    start = time.monotonic()
    path = find_stored(name, root)
    target = new_target(target_name, root, may_be_step=True)
    refuse_existing(target, overwrite)
    refuse_own_source(path, target)
    limit = RateLimit(max_bytes_per_s)
    if isinstance(path, StorePath):
        path.store.limit_rate(max_bytes_per_s)  # or what is fetched ahead would come in a rush
    whole = read_stored(path) if model_only else None
    model = only_model(whole) if whole else None
    notes = model_only_notes(whole, model) if whole and model else ()
    if model and (is_checkpoint(path) or not notes):
        plan = _copy_model(path, target, model, overwrite, dry_run, progress, limit)
    else:
        plan = _copy_folder(path, target, overwrite, dry_run, progress, limit)
    plan = dataclasses.replace(plan, notes=(*notes, *plan.notes))
    return Result("copy", str(target), plan, not dry_run, time.monotonic() - start, plan.notes)


def _copy_folder(
    path: Place,
    target: Place,
    overwrite: bool,
    dry_run: bool,
    progress: Callable[[Plan], Progress] | None,
    limit: RateLimit,
) -> Plan:
    manifest = read_stored(path)
    notes = list(stored_notes(path))
    digests = read_digests(path, manifest.save_id)
    listed = digests.files if digests else {}
    last = [name for name in (DIGESTS_FILE, METADATA_FILE) if (path / name).exists()]
    beside = () if is_checkpoint(path) else (f"{SIDE_FOLDER}/{name}" for name in files_below(path / SIDE_FOLDER))
    check_none_missing(path, listed)
    names = [*sorted({*files_below(path), *beside, *listed} - set(last)), *last]
    with os_errors(path):
        num_bytes = sum(safe_join(path, name).stat().st_size for name in names)
    plan = Plan("copy", str(path), str(target), (), num_bytes, num_bytes, _PIECE_BYTES, num_bytes, tuple(notes))
    check_disk(target, plan)
    if dry_run:
        return plan
    report = progress(plan) if progress else None
    notes += _copy_files(path, target, names, listed, overwrite, report, limit)
    return dataclasses.replace(plan, notes=tuple(notes))


def _copy_files(
    path: Place,
    target: Place,
    names: Sequence[str],
    listed: Mapping[str, FileDigest],
    overwrite: bool,
    report: Progress | None,
    limit: RateLimit,
) -> list[str]:
    """Copy a few files at a time; those that an interrupted attempt has finished are left out. Returns notes."""
    versions = [(name, file_version(safe_join(path, name))) for name in names]
    key = blake3(repr([str(path), versions]).encode()).hexdigest()
    staging = (
        create_staging(target, overwrite, keep_left=True) if isinstance(target, Path) else Upload(target, overwrite)
    )
    is_stopped = threading.Event()

    def moved(num_bytes: int) -> None:
        if is_stopped.is_set():
            raise StorageError(f"copying to {target} was stopped")
        limit.take(num_bytes)
        if report:
            report(num_bytes)

    def bring(name: str) -> None:
        digest = copy_file(path, staging.content, name, listed.get(name), moved)
        record = FileRecord(name, digest.num_bytes, digest.blake3)
        if isinstance(staging, Staging):
            with journal_lock, os_errors(staging.content):
                journal.append(record.to_json())
        elif name not in MARKERS:
            staging.keep(record, key)

    try:
        done = _begin(staging, key, limit)
        if report:
            report(sum(record.num_bytes for record in done.values()))
        journal, journal_lock = Journal(staging.content.parent, key), threading.Lock()
        with ThreadPoolExecutor(NUM_UPLOADS, "copy") as workers:
            try:
                for _ in workers.map(bring, [name for name in names if name not in done]):
                    pass
            except BaseException:
                is_stopped.set()
                workers.shutdown(wait=False, cancel_futures=True)
                raise
        raise_if_interrupted()
        staging.publish()
    except BaseException as error:
        leave(staging, key, error)
        raise
    return [f"went on from an interrupted attempt: {len(done)} of {len(names)} files were done"] if done else []


def _begin(staging: Staging | Upload, key: str, limit: RateLimit) -> dict[str, FileRecord]:
    """Make the folder to write into; the files that an interrupted attempt has left there, by name."""
    if isinstance(staging, Upload):
        staging.target.store.limit_rate(limit.bytes_per_s)
        return staging.begin(key)
    with os_errors(staging.content):
        staging.content.mkdir(exist_ok=True)
    kept = kept_files(staging.content, key)
    remove_rest(staging.content, key, kept.values())
    return kept


def copy_file(
    source: Place, target: Path, name: str, recorded: FileDigest | None, moved: Progress = lambda num_bytes: None
) -> FileDigest:
    """Copy one file, flush it, and compare what the disk gives back with what was read; its digest. `moved` is told of
    each piece."""
    origin, copied = safe_join(source, name), target / name
    with os_errors(copied):
        copied.parent.mkdir(parents=True, exist_ok=True)
        with open_binary(origin, in_order=True) as opened, contextlib.closing(HashingFile(copied)) as writer:
            reader: Any = opened
            buffer = memoryview(bytearray(_PIECE_BYTES))
            while count := reader.readinto(buffer):
                writer.write(buffer[:count])
                moved(count)
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
    path: Place,
    target: Place,
    manifest: Manifest,
    overwrite: bool,
    dry_run: bool,
    progress: Callable[[Plan], Progress] | None,
    limit: RateLimit,
) -> Plan:
    from ckptool.formats.dcp_sink import DcpSink

    with contextlib.closing(open_stored(path)) as source:
        digests = read_digests(path, manifest.save_id)
        folder, side_files = _hf_files(path)
        plan = _plan_model(target, manifest, sum((folder / name).stat().st_size for name in side_files))
        if not is_checkpoint(path):
            note = "the ranks' safetensors files hold more than the model, which is written as plain DCP"
            plan = dataclasses.replace(plan, notes=(*source_notes(source), *plan.notes, note))
        check_disk(target, plan)
        if dry_run:
            return plan
        tensors = {entry.fqn: entry for item in plan.items for entry in item.targets}

        def beside(content: Path) -> None:
            for name in side_files:
                copy_file(folder, content / "hf", name, None)
            _write_model_provenance(content, manifest)

        def limited(plan: Plan) -> Progress:
            report = progress(plan) if progress else None

            def moved(num_bytes: int) -> None:
                limit.take(num_bytes)
                if report:
                    report(num_bytes)

            return moved

        if isinstance(target, StorePath):
            target.store.limit_rate(limit.bytes_per_s)
        notes = convert(
            plan,
            source,
            path,
            target,
            lambda content: DcpSink(content, tensors, manifest.paths, manifest.ties),
            Execution(overwrite=overwrite, progress=limited),
            before=beside,
            after=lambda content: _check_model(content, digests, is_here=isinstance(target, Path)),
        )
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def _plan_model(target: Place, manifest: Manifest, side_bytes: int) -> Plan:
    shapes = {fqn: entry.shape for fqn, entry in manifest.tensors.items() if fqn not in manifest.ties}
    return plan_conversion(
        "copy",
        manifest,
        dataclasses.replace(keep_names(shapes, None, ""), notes=()),
        str(target),
        cut=cut_tensor,
        piece_bytes=_CHUNK_BYTES,
        lay_out=dcp_parts,
        extra_disk_bytes=side_bytes,
        chunk_overhead_bytes=_CHUNK_OVERHEAD_BYTES,
    )


def _hf_files(path: Place) -> tuple[Place, list[str]]:
    """The folder of the model's config and tokenizer, and the files there."""
    if is_checkpoint(path):
        return path / "hf", list(files_below(path / "hf"))
    config = find_config(path, "")
    return config.path, list(config.side)


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


def _check_model(content: Path, source_digests: Digests | None, is_here: bool) -> None:
    """Compare the new checkpoint's tensors with what the source recorded of them; read all of it back from the disk if
    it `is_here`: what went into a store was read back as it went."""
    made = read_digests(content, parse_manifest(content, None).save_id)
    if is_here:
        _read_back(content)
    recorded = source_digests.tensors if source_digests else {}
    for fqn, record in made.tensors.items() if made else ():
        if fqn in recorded and recorded[fqn] != record:
            raise DamagedError(f"tensor {fqn} is not what the source's {DIGESTS_FILE} lists")


def _read_back(content: Path) -> None:
    for file in content.rglob("*"):
        if file.is_file():
            with os_errors(file):
                _drop_from_cache(file)
    structure = check_structure(content)
    findings = list(structure.findings)
    if structure.manifest is not None:
        findings += check_bytes(content, structure.manifest, structure.digests).findings
    if findings:
        raise StorageError(
            f"{content} does not read back as it was written: {findings[0].message}", hint="the disk may be failing"
        )
