"""A checkpoint cut anew for another world size or mesh: every rank then finds its own bytes in its own file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import Progress
from ckptool.core.layout import Layout
from ckptool.core.mesh import Mesh
from ckptool.core.parts import Part, PlanItem
from ckptool.core.plan import PIECE_BYTES, Plan, Result
from ckptool.core.rank_files import Stored, assign, band, groups_of_ranks
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError
from ckptool.formats.dcp_metadata import METADATA_FILE, PROVENANCE_FILE, parse_manifest
from ckptool.formats.dcp_sink import DcpSink
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.sharded_safetensors import ShardedSafetensors
from ckptool.naming.groups import keep_names
from ckptool.naming.sections import model_only_notes, only_model
from ckptool.ops.bands import BandSource
from ckptool.ops.conversion import Execution, convert
from ckptool.ops.copy import copy_file
from ckptool.ops.import_hf import CHUNK_OVERHEAD_BYTES, DIGEST_RECORD_BYTES
from ckptool.ops.layouts import read_layout
from ckptool.ops.model_source import ConfigFolder, find_config
from ckptool.ops.provenance import new_provenance, write_provenance
from ckptool.ops.reshard_links import can_link, fits, link_checkpoint
from ckptool.ops.side_files_kept import check_none_missing
from ckptool.ops.stored import StoredSource, find_stored, open_stored, source_notes
from ckptool.ops.targets import check_disk, new_target, refuse_own_source
from ckptool.planner import plan_conversion
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, read_digests
from ckptool.storage.files import Place
from ckptool.storage.place import files_below, local_path
from ckptool.storage.staging import refuse_existing, staged_directory
from ckptool.storage.zip_errors import ZIP_ERRORS

if TYPE_CHECKING:
    from ckptool.ranks import Ranks

CHUNK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is to be written where: `manifest` holds only what is taken along, `side_files` are copied as they are, and
    a model's files in `config` are copied to `hf/`."""

    path: Place
    target: Place
    manifest: Manifest
    digests: Digests | None
    layout: Layout
    side_files: tuple[str, ...]
    config: ConfigFolder | None = None

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
    root: Place | None = None,
    placements: Path | None = None,
    model_only: bool = False,
    rewrite: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    num_workers: int | None = None,
    memory_bytes: int | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[Plan], Progress] | None = None,
) -> Result:
    """Write checkpoint `name` as `target_name`, stored for the ranks of `mesh`, with all that is in it.

    `placements` is a TOML file (see `ops.layouts.read_placements`); without one FSDP2's rule holds, and transformers'
    plan on the axes tp and ep. `model_only` leaves everything but the model behind. Where every stored chunk already
    lies within one rank's part the data files are hard-linked instead, unless `rewrite`. `resume`, `num_workers`,
    `memory_bytes` and `ranks` are as for `import_hf`.

    The tensors written are compared with the source's digests, where there are any. Raises UsageError or MismatchError
    for a mesh or placements that don't fit, MismatchError too for DCP in safetensors of other shapes than the config's,
    DamagedError when the source isn't what was written; the target then is as it was.
    """
    start = time.monotonic()
    path = find_stored(name, root)
    target = new_target(target_name, root, may_be_step=True)
    refuse_existing(target, overwrite)
    refuse_own_source(path, target)
    with contextlib.closing(open_stored(path)) as source:
        read_notes = source_notes(source)
        job = _open_job(path, target, source, mesh, placements, model_only)
        linked = isinstance(source, DcpSource) and not (rewrite or model_only)
        linked = linked and fits(job.manifest, job.layout) and can_link(path, target)
        stored = {} if linked else assign(job.tensors.values(), job.layout, CHUNK_BYTES, PIECE_BYTES)
        plan = _plan_links(job) if linked else _plan_rewrite(job, stored, num_workers, memory_bytes)
        plan = dataclasses.replace(plan, notes=(*read_notes, *plan.notes))
        check_disk(target, plan, ranks=ranks)
        notes = [*plan.notes, *(model_only_notes(source.manifest, job.manifest) if model_only else ())]
        if linked and not dry_run:
            with staged_directory(target, overwrite) as staging:
                _write_beside(job, staging)
                link_checkpoint(local_path(path, "linking"), staging, job.manifest, job.digests)
                _check_digests(staging, job)
        elif not dry_run:
            if isinstance(source, DcpSource):
                source.check_crc = job.digests is None
            notes += convert(
                plan,
                _CheckedSource(source),
                path,
                target,
                lambda content: _open_sink(content, job, stored),
                Execution(overwrite, resume, progress, ranks),
                before=lambda content: _write_beside(job, content),
                after=lambda content: _check_digests(content, job),
            )
    details = {"world_size": mesh.world_size, "mesh": mesh.to_json(), "linked": linked}
    return Result("reshard", str(target), plan, not dry_run, time.monotonic() - start, tuple(notes), details)


def _open_job(
    path: Place, target: Place, source: StoredSource, mesh: Mesh, placements: Path | None, model_only: bool
) -> _Job:
    manifest = only_model(source.manifest) if model_only else source.manifest
    if isinstance(source, ShardedSafetensors):
        config = find_config(path, "")
        return _Job(path, target, manifest, None, read_layout(path, manifest, mesh, placements), (), config)
    known = {*source.manifest.files, DIGESTS_FILE, PROVENANCE_FILE, METADATA_FILE}
    side = [name for name in files_below(path) if name not in known and not name.endswith(".distcp")]
    if model_only:
        side = [name for name in side if name.startswith("hf/")]
    digests = read_digests(path, manifest.save_id)
    listed = digests.files if digests else {}
    beside = [name for name in listed if not name.endswith(".distcp")]  # a lost one of those is met when it is read
    check_none_missing(path, [name for name in beside if name.startswith("hf/") or not model_only])
    return _Job(path, target, manifest, digests, read_layout(path, manifest, mesh, placements), tuple(side))


def _plan_links(job: _Job) -> Plan:
    note = "the stored chunks fit the mesh as they are: the data files are linked, not written again"
    disk_bytes = _side_bytes(job)
    notes = (note, *_rank_notes(job))
    return Plan("reshard", str(job.path), str(job.target), (), disk_bytes, disk_bytes, 0, disk_bytes, notes)


def _plan_rewrite(job: _Job, stored: Mapping[str, Stored], num_workers: int | None, memory_bytes: int | None) -> Plan:
    def cut(fqn: str, dtype: str, shape: tuple[int, ...], max_chunk_bytes: int) -> TensorEntry:
        return TensorEntry(fqn, dtype, shape, tuple(Chunk(box) for box, _ in stored[fqn]))

    names = keep_names({fqn: entry.shape for fqn, entry in job.tensors.items()}, None, "")
    plan = plan_conversion(
        "reshard",
        job.manifest,
        names,
        str(job.target),
        cut=cut,
        piece_bytes=CHUNK_BYTES,
        lay_out=lambda items: _parts(job, stored, items),
        extra_disk_bytes=_side_bytes(job) + len(job.tensors) * DIGEST_RECORD_BYTES,
        chunk_overhead_bytes=CHUNK_OVERHEAD_BYTES,
        num_workers=num_workers,
        memory_bytes=memory_bytes,
    )
    bands = (
        band(box, entry.shape).num_elements * entry.itemsize_bytes
        for fqn, entry in job.tensors.items()
        for box, _ in stored[fqn]
        if not box.is_contiguous_in(entry.shape)
    )
    peak_bytes = plan.peak_bytes + plan.num_workers * max(bands, default=0)
    return dataclasses.replace(plan, peak_bytes=peak_bytes, notes=_rank_notes(job))


def _parts(job: _Job, stored: Mapping[str, Stored], items: list[PlanItem]) -> list[Part]:
    """The files of ranks that share reads are one part; an item is in every part that stores some of its tensor."""
    shapes = {fqn: entry.shape for fqn, entry in job.tensors.items()}
    groups = groups_of_ranks(stored, shapes)
    objects: dict[int, list[str]] = {}
    for fqn in job.manifest.objects:
        objects.setdefault(_object_rank(fqn, job), []).append(fqn)
    groups += [[rank] for rank in objects if not any(rank in group for group in groups)]
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    of_group: list[list[PlanItem]] = [[] for _ in groups]
    for item in items:
        (entry,) = item.targets
        chunks: dict[int, list[Chunk]] = {}
        for box, rank in stored[entry.fqn]:
            chunks.setdefault(group_of[rank], []).append(Chunk(box))
        for i, its_chunks in chunks.items():
            part = dataclasses.replace(entry, chunks=tuple(its_chunks))
            of_group[i].append(dataclasses.replace(item, targets=(part,)))
    return [
        Part(
            tuple(map(_file_name, group)),
            tuple(of_group[i]),
            tuple(fqn for rank in group for fqn in objects.get(rank, ())),
        )
        for i, group in enumerate(groups)
    ]


def _open_sink(folder: Path, job: _Job, stored: Mapping[str, Stored]) -> DcpSink:
    ranks = {(fqn, box): rank for fqn, places in stored.items() for box, rank in places}
    taken = {*job.tensors, *job.manifest.ties, *job.manifest.objects}

    def file_of(fqn: str, chunk: Box | None) -> str:
        return _file_name(_object_rank(fqn, job) if chunk is None else ranks[fqn, chunk])

    paths = {fqn: path for fqn, path in job.manifest.paths.items() if fqn in taken}
    return DcpSink(folder, job.tensors, paths, job.manifest.ties, file_of)


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _object_rank(fqn: str, job: _Job) -> int:
    """The rank in whose file an object goes: its own one, while there is such a rank."""
    own = job.layout.own_rank(fqn) or 0
    return own if own < job.layout.mesh.world_size else 0


class _CheckedSource(BandSource):
    """The checkpoint to reshard: boxes that lie side by side are read together, objects are checked."""

    def read_object(self, fqn: str) -> bytes:
        return _check_object(super().read_object(fqn), f"{self.manifest.location}: {fqn}")


def _check_object(blob: bytes, name: str) -> bytes:
    """An object's blob. Raises DamagedError when it isn't what its own checksums say."""
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            # As for tensors, 0 says that the writer computed none.
            for member in archive.infolist():
                if member.CRC:
                    archive.read(member)
    except ZIP_ERRORS as error:
        raise DamagedError(f"{name} is damaged: {error}") from error
    return blob


def _write_beside(job: _Job, staging: Path) -> None:
    """Side files, compared with their digests, and where the checkpoint comes from; its writer is this process."""
    recorded = job.digests.files if job.digests else {}
    for name in job.side_files:
        copy_file(job.path, staging, name, recorded.get(name))
    if job.config is not None:
        for name in job.config.side:
            copy_file(job.config.path, staging / "hf", name, None)
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
    manifest = parse_manifest(staging, None)  # into a store, the data files are there already and no longer here
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
    beside = sum((job.path / name).stat().st_size for name in job.side_files)
    return beside + (job.config.num_bytes if job.config else 0)


def _first_place(entry: TensorEntry) -> tuple[str, int]:
    place = next((chunk.locator for chunk in entry.chunks if chunk.locator), None)
    return (place.file, place.offset) if place else ("", 0)
