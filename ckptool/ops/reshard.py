"""A checkpoint cut anew for another world size or mesh: every rank then finds its own bytes in its own file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptool import engine
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import Progress
from ckptool.core.layout import Layout
from ckptool.core.mesh import Mesh
from ckptool.core.plan import Plan, Result
from ckptool.core.rank_files import Stored, assign, band
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError, NotFoundError
from ckptool.formats.dcp_metadata import METADATA_FILE, MODEL_PREFIX, PROVENANCE_FILE, read_manifest
from ckptool.formats.dcp_sink import MAX_OPEN_FILES, DcpSink
from ckptool.formats.dcp_source import DcpSource
from ckptool.naming.groups import keep_names
from ckptool.ops.bands import BandSource
from ckptool.ops.checks.structure import visible_files
from ckptool.ops.copy import copy_file
from ckptool.ops.import_hf import CHUNK_OVERHEAD_BYTES, DIGEST_RECORD_BYTES
from ckptool.ops.layouts import read_layout
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.reshard_links import can_link, fits, link_checkpoint
from ckptool.ops.targets import check_disk, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.runs import resolve
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, read_digests
from ckptool.storage.staging import refuse_existing, staged_directory

PIECE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is to be written where: `manifest` holds only what is taken along, `side_files` are copied as they are."""

    path: Path
    target: Path
    manifest: Manifest
    digests: Digests | None
    layout: Layout
    side_files: tuple[str, ...]

    @functools.cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor once, in the order in which they lie in their files."""
        stored = (e for fqn, e in self.manifest.tensors.items() if fqn not in self.manifest.ties)
        return {entry.fqn: entry for entry in sorted(stored, key=_first_place)}


def reshard(
    name: str,
    target_name: str,
    *,
    mesh: Mesh,
    root: Path | None = None,
    placements: Path | None = None,
    model_only: bool = False,
    rewrite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Write checkpoint `name` as `target_name`, stored for the ranks of `mesh`, with all that is in it.

    `placements` is a TOML file (see `ops.layouts.read_placements`); without one FSDP2's rule holds, and transformers'
    plan on the axes tp and ep. `model_only` leaves everything but `model.*` behind. Where every stored chunk already
    lies within one rank's part the data files are hard-linked instead, unless `rewrite`.

    The tensors written are compared with the source's digests. Raises UsageError or MismatchError for a mesh or
    placements that don't fit, DamagedError when the source isn't what was written; the target then is as it was.
    """
    start = time.monotonic()
    path = resolve(name, root)
    target = new_target(target_name, root, may_be_step=True)
    refuse_existing(target, overwrite)
    refuse_own_source(path, target)
    with contextlib.closing(DcpSource(path)) as source:
        job = _open_job(path, target, source.manifest, mesh, placements, model_only)
        linked = not (rewrite or model_only) and fits(job.manifest, job.layout) and can_link(path, target)
        stored = {} if linked else assign(job.tensors.values(), job.layout, PIECE_BYTES)
        plan = _plan_links(job) if linked else _plan_rewrite(job, stored)
        check_disk(target, plan)
        if not dry_run:
            source.check_crc = job.digests is None
            with staged_directory(target, overwrite) as staging:
                report = progress(plan) if progress else None
                _write_beside(job, staging)
                if linked:
                    link_checkpoint(path, staging, job.manifest, job.digests)
                else:
                    _rewrite(job, plan, stored, source, staging, report)
                _check_digests(staging, job)
    details = {"world_size": mesh.world_size, "mesh": mesh.to_json(), "linked": linked}
    return Result("reshard", str(target), plan, not dry_run, time.monotonic() - start, plan.notes, details)


def _open_job(
    path: Path, target: Path, manifest: Manifest, mesh: Mesh, placements: Path | None, model_only: bool
) -> _Job:
    known = {*manifest.files, DIGESTS_FILE, PROVENANCE_FILE, METADATA_FILE}
    side = [name for name in visible_files(path) if name not in known and not name.endswith(".distcp")]
    if model_only:
        side = [name for name in side if name.startswith("hf/")]
        manifest = _only_model(path, manifest)
    layout = read_layout(path, manifest, mesh, placements)
    return _Job(path, target, manifest, read_digests(path, manifest.save_id), layout, tuple(side))


def _only_model(path: Path, manifest: Manifest) -> Manifest:
    """The model's part of a checkpoint; a name tied to something else becomes a tensor of its own."""
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if fqn.startswith(MODEL_PREFIX)}
    if not tensors:
        raise NotFoundError(f"{path} has no `model.*` tensors", hint=f"ckptool inspect {path} shows what it holds")
    ties = {alias: canonical for alias, canonical in manifest.ties.items() if alias in tensors and canonical in tensors}
    return dataclasses.replace(manifest, tensors=tensors, objects={}, ties=ties)


def _plan_links(job: _Job) -> Plan:
    note = "the stored chunks fit the mesh as they are: the data files are linked, not written again"
    disk_bytes = _side_bytes(job)
    notes = (note, *_rank_notes(job))
    return Plan("reshard", str(job.path), str(job.target), (), disk_bytes, disk_bytes, 0, disk_bytes, notes)


def _plan_rewrite(job: _Job, stored: Mapping[str, Stored]) -> Plan:
    def cut(fqn: str, dtype: str, shape: tuple[int, ...], piece_bytes: int) -> TensorEntry:
        return TensorEntry(fqn, dtype, shape, tuple(Chunk(box) for box, _ in stored[fqn]))

    names = keep_names({fqn: entry.shape for fqn, entry in job.tensors.items()}, None, "")
    plan = plan_conversion(
        "reshard",
        job.manifest,
        names,
        str(job.target),
        cut=cut,
        piece_bytes=PIECE_BYTES,
        extra_disk_bytes=_side_bytes(job) + len(job.tensors) * DIGEST_RECORD_BYTES,
        chunk_overhead_bytes=CHUNK_OVERHEAD_BYTES,
    )
    bands = (
        band(box, entry.shape).num_elements * entry.itemsize_bytes
        for fqn, entry in job.tensors.items()
        for box, _ in stored[fqn]
        if not box.is_contiguous_in(entry.shape)
    )
    return dataclasses.replace(plan, peak_bytes=plan.peak_bytes + max(bands, default=0), notes=_rank_notes(job))


def _rewrite(
    job: _Job, plan: Plan, stored: Mapping[str, Stored], source: DcpSource, staging: Path, report: Progress | None
) -> None:
    ranks = {(fqn, box): rank for fqn, places in stored.items() for box, rank in places}
    taken = {*job.tensors, *job.manifest.ties, *job.manifest.objects}
    sink = DcpSink(
        staging,
        job.tensors,
        {fqn: path for fqn, path in job.manifest.paths.items() if fqn in taken},
        job.manifest.ties,
        max_file_bytes=sys.maxsize,
        rank_of=lambda fqn, box: ranks[fqn, box],
    )
    for fqn in job.manifest.objects:
        own = job.layout.own_rank(fqn) or 0
        sink.write_object(fqn, _read_object(source, fqn), own if own < job.layout.mesh.world_size else 0)
    engine.run(_by_rank_groups(plan, ranks), BandSource(source), sink, report)


def _by_rank_groups(plan: Plan, ranks: Mapping[tuple, int]) -> Plan:
    """The same work, done for as many ranks at a time as the sink keeps files open."""
    groups: dict[int, list] = {}
    for item in plan.items:
        (entry,) = item.targets
        chunks: dict[int, list[Chunk]] = {}
        for chunk in entry.chunks:
            chunks.setdefault(ranks[entry.fqn, chunk.box] // MAX_OPEN_FILES, []).append(chunk)
        for group, its_chunks in chunks.items():
            part = dataclasses.replace(entry, chunks=tuple(its_chunks))
            groups.setdefault(group, []).append(dataclasses.replace(item, targets=(part,)))
    return dataclasses.replace(plan, items=tuple(item for group in sorted(groups) for item in groups[group]))


def _read_object(source: DcpSource, fqn: str) -> bytes:
    """An object's blob as it is stored. Raises DamagedError when it isn't what its own checksums say."""
    blob = source.read_object(fqn)
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            # As for tensors, 0 says that the writer computed none.
            for member in archive.infolist():
                if member.CRC:
                    archive.read(member)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise DamagedError(f"{source.manifest.location}: {fqn} is damaged: {error}") from error
    return blob


def _write_beside(job: _Job, staging: Path) -> None:
    """Side files, compared with their digests, and where the checkpoint comes from; its writer is this process."""
    recorded = job.digests.files if job.digests else {}
    for name in job.side_files:
        copy_file(job.path, staging, name, recorded.get(name), None)
    if job.manifest.provenance is not None:
        if PROVENANCE_FILE in recorded and digest_file(job.path / PROVENANCE_FILE) != recorded[PROVENANCE_FILE].blake3:
            raise DamagedError(f"{job.path / PROVENANCE_FILE} is not what {DIGESTS_FILE} lists: it changed")
        writer = new_provenance()
        mesh = job.layout.mesh
        provenance = dataclasses.replace(
            job.manifest.provenance,
            tool_version=writer.tool_version,
            created=writer.created,
            libraries=writer.libraries,
            world_size=mesh.world_size,
            mesh=mesh.to_json(),
        )
        write_provenance(staging, provenance)


def _check_digests(staging: Path, job: _Job) -> None:
    """Read the new checkpoint's description back, and hold its tensors' digests against the source's."""
    manifest = read_manifest(staging)
    made = read_digests(staging, manifest.save_id)
    if job.digests is None or made is None:
        return
    for fqn, record in made.tensors.items():
        if job.digests.tensors.get(fqn) != record:
            raise DamagedError(
                f"tensor {fqn} of {job.path} is not what its {DIGESTS_FILE} lists: it changed after it was written",
                hint=f"ckptool verify {job.path} tells where",
            )


def _rank_notes(job: _Job) -> tuple[str, ...]:
    """What becomes of entries that are of one rank each, such as states of random number generators."""
    world_size = job.layout.mesh.world_size
    owners = {job.layout.own_rank(fqn) for fqn in (*job.manifest.tensors, *job.manifest.objects)} - {None}
    gone = sorted(rank for rank in owners if rank is not None and rank >= world_size)
    new = [rank for rank in range(world_size) if rank not in owners]
    notes = []
    if gone:
        notes.append(f"entries of {_name_ranks(gone)} are kept, but the mesh has no such rank to ask for them")
    if owners and new:
        notes.append(f"{_name_ranks(new)}: no entries of their own, as other ranks have")
    return tuple(notes)


def _name_ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _side_bytes(job: _Job) -> int:
    return sum((job.path / name).stat().st_size for name in job.side_files)


def _first_place(entry: TensorEntry) -> tuple[str, int]:
    place = next((chunk.locator for chunk in entry.chunks if chunk.locator), None)
    return (place.file, place.offset) if place else ("", 0)
