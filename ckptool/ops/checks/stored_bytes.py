"""Are the bytes those that were written? BLAKE3 of whole files by digests.json, the CRC of each stored chunk elsewhere.

A file that differs is searched chunk by chunk, so that the finding names tensor, file and offset.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.findings import Finding
from ckptool.core.interfaces import Progress
from ckptool.core.tensors import Locator
from ckptool.errors import DamagedError, StorageError
from ckptool.formats.dcp_entry import StoredTensor, read_entry
from ckptool.ops.blocks import in_threads, num_workers
from ckptool.ops.checks import next_steps
from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests
from ckptool.storage.fetch_ahead import RANGE_BYTES, FetchAhead, slices
from ckptool.storage.files import Place, RangeReader, safe_join
from ckptool.storage.place import range_reader
from ckptool.storage.read_ahead import read_ahead
from ckptool.storage.zip_errors import ZIP_ERRORS

_MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One stored byte range: a chunk of tensor `fqn` (`dtype` and `box` are what the metadata says) or an object."""

    fqn: str
    locator: Locator
    dtype: str = ""
    box: Box | None = None


@dataclass(frozen=True)
class BytesReport:
    """`num_bytes` were read; `num_unsummed` chunks carry no checksum and are covered by no file digest."""

    findings: tuple[Finding, ...] = ()
    num_files: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    num_unsummed: int = 0


@dataclass
class _Job:
    """What every check needs to know."""

    folder: Place
    manifest: Manifest
    digests: Digests | None
    step: str
    report: Progress | None = None
    chunks_of: dict[str, list[StoredChunk]] = field(default_factory=dict)


def check_bytes(
    folder: Place,
    manifest: Manifest,
    digests: Digests | None,
    skip_files: frozenset[str] = frozenset(),
    part: tuple[int, int] = (1, 1),
    report: Progress | None = None,
) -> BytesReport:
    """Check every file but `skip_files` (those known to be missing or cut short).

    `part` (k, n) checks the k-th of n parts, cut by chunk, always the same way: n runs check everything once.
    """
    chunks = [chunk for chunk in stored_chunks(manifest) if chunk.locator.file not in skip_files]
    job = _Job(folder, manifest, digests, next_steps.another_copy(folder, manifest), report)
    for chunk in chunks:
        job.chunks_of.setdefault(chunk.locator.file, []).append(chunk)
    files = set(digests.files) - skip_files if digests else set()
    if part[1] == 1:
        chunks = [chunk for chunk in chunks if chunk.locator.file not in files]
    else:
        files -= set(job.chunks_of)
    k, n = part
    units: list[str | StoredChunk] = [*sorted(files), *chunks]
    batches = _batches(units[k - 1 :: n])
    parts = [one for found in in_threads(lambda batch: _check_batch(job, batch), batches) for one in found]
    return BytesReport(
        findings=tuple(finding for one in parts for finding in one.findings),
        num_files=len({_file_of(unit) for batch in batches for unit in batch}),
        num_chunks=sum(one.num_chunks for one in parts),
        num_bytes=sum(one.num_bytes for one in parts),
        num_unsummed=sum(one.num_unsummed for one in parts),
    )


def _batches(units: Sequence[str | StoredChunk]) -> list[list[str | StoredChunk]]:
    """What a thread does at a time: a file (those come first), or a few chunks, of which there may be a million."""
    batches: list[list[str | StoredChunk]] = [[unit] for unit in units if isinstance(unit, str)]
    chunks = units[len(batches) :]
    size = max(1, min(_MAX_BATCH, len(chunks) // (4 * num_workers())))
    return [*batches, *(list(chunks[i : i + size]) for i in range(0, len(chunks), size))]


def _file_of(unit: str | StoredChunk) -> str:
    return unit if isinstance(unit, str) else unit.locator.file


def stored_chunks(manifest: Manifest) -> list[StoredChunk]:
    """Every stored byte range once, in the order of files and offsets."""
    chunks: dict[Locator, StoredChunk] = {}
    for fqn, entry in manifest.tensors.items():
        if fqn not in manifest.ties:
            for chunk in entry.chunks:
                if chunk.locator:
                    chunks[chunk.locator] = StoredChunk(fqn, chunk.locator, entry.dtype, chunk.box)
    for fqn, item in manifest.objects.items():
        if item.locator:
            chunks[item.locator] = StoredChunk(fqn, item.locator)
    return sorted(chunks.values(), key=lambda chunk: (chunk.locator.file, chunk.locator.offset))


def _check_batch(job: _Job, batch: Sequence[str | StoredChunk]) -> list[BytesReport]:
    files = [_check_file(job, unit) for unit in batch if isinstance(unit, str)]
    return [*files, *_check_chunks(job, [unit for unit in batch if not isinstance(unit, str)])]


def _check_chunks(job: _Job, chunks: Sequence[StoredChunk]) -> list[BytesReport]:
    reports = []
    reader = range_reader(job.folder)
    wanted = (reader.ranges(chunk.locator.file, chunk.locator.offset, chunk.locator.length) for chunk in chunks)
    with contextlib.closing(reader), FetchAhead(part for ranges in wanted for part in slices(ranges)) as ahead:
        num_reads = 0
        for chunk in chunks:

            def moved(num_bytes: int, first: int = num_reads) -> None:
                ahead.passed(first + num_bytes // RANGE_BYTES)

            reports.append(_check_chunk(job, reader, chunk, moved))
            num_reads += -(-chunk.locator.length // RANGE_BYTES)
            ahead.passed(num_reads)
    return reports


def _check_file(job: _Job, name: str) -> BytesReport:
    if job.digests is None:
        return BytesReport()
    path = safe_join(job.folder, name)
    try:
        actual, num_bytes = digest_file(path, job.report), path.stat().st_size
    except StorageError as error:
        return BytesReport((Finding("corrupt", f"{name} can't be read: {error}", file=name, next_step=job.step),))
    if actual == job.digests.files[name].blake3:
        return BytesReport(num_files=1, num_bytes=num_bytes, num_chunks=len(job.chunks_of.get(name, ())))
    return BytesReport(tuple(_explain_file(job, name, actual)), num_files=1, num_bytes=num_bytes)


def _explain_file(job: _Job, name: str, actual: str) -> Iterator[Finding]:
    """A file whose digest differs: the chunks at fault, or what else can be said."""
    found = [f for report in _check_chunks(job, job.chunks_of.get(name, ())) for f in report.findings]
    if found:
        yield from found
        return
    twins = [other for other, digest in (job.digests.files if job.digests else {}).items() if digest.blake3 == actual]
    if twins:
        message = f"{name} holds the bytes of {twins[0]}"
    elif name in job.chunks_of:
        message = f"{name} is not what {DIGESTS_FILE} lists, though each chunk in it is whole: another save's file?"
    else:
        message = f"{name} was changed after it was written"
    yield Finding("corrupt", message, file=name, next_step=job.step)


def _check_chunk(job: _Job, reader: RangeReader, chunk: StoredChunk, moved: Callable[[int], None]) -> BytesReport:
    """Compare a chunk with the checksums stored in it, and with what the metadata says of it. `moved` is told how many
    bytes from its start on are done with."""
    if chunk.box is None:
        return _check_object(job, reader, chunk)
    try:
        stored = read_entry(reader, chunk.locator)
        crc32 = _payload_crc32(job, reader, chunk.locator, stored, moved)
    except (DamagedError, StorageError) as error:
        return BytesReport((_finding(job, chunk, str(error), chunk.locator.offset),))
    if (stored.dtype, stored.shape) != (chunk.dtype, chunk.box.sizes):
        message = f"is {stored.dtype} {list(stored.shape)}, .metadata says {chunk.dtype} {list(chunk.box.sizes)}"
        return BytesReport((_finding(job, chunk, message, chunk.locator.offset),))
    unsummed = int(stored.crc32 == 0 and stored.payload_bytes > 0)
    findings: tuple[Finding, ...] = ()
    if not unsummed and crc32 != stored.crc32:
        message = f"its {stored.payload_bytes} bytes have changed since they were written (checksum mismatch)"
        findings = (_finding(job, chunk, message, stored.payload_offset),)
    return BytesReport(findings, num_chunks=1, num_bytes=stored.payload_bytes, num_unsummed=unsummed)


def _finding(job: _Job, chunk: StoredChunk, message: str, offset_bytes: int) -> Finding:
    if chunk.box is None:
        what = f"object {chunk.fqn}"
    else:
        what = f"tensor {chunk.fqn}, the chunk at {list(chunk.box.offsets)} of size {list(chunk.box.sizes)}"
    # The errors of the readers name the place themselves.
    place = "" if chunk.locator.file in message else f"{chunk.locator.file} at byte {offset_bytes}: "
    text = f"{place}{what}: {message}"
    return Finding("corrupt", text, chunk.fqn, chunk.locator.file, offset_bytes, job.step)


def _payload_crc32(
    job: _Job, reader: RangeReader, locator: Locator, stored: StoredTensor, moved: Callable[[int], None]
) -> int:
    done = 0

    def read(buffer: memoryview) -> int:
        nonlocal done
        piece = buffer[: stored.payload_bytes - done]
        reader.read_into(locator.file, stored.payload_offset + done, piece)
        done += len(piece)
        moved(stored.payload_offset + done - locator.offset)
        return len(piece)

    crc32 = 0
    for piece in read_ahead(read, stored.payload_bytes):
        crc32 = zlib.crc32(piece, crc32)
        if job.report:
            job.report(len(piece))
    return crc32


def _check_object(job: _Job, reader: RangeReader, chunk: StoredChunk) -> BytesReport:
    """An object's archive: every member must have its checksum. Nothing of it is unpickled."""
    locator = chunk.locator
    num_unsummed = 0
    try:
        blob = reader.read(locator.file, locator.offset, locator.length)
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{member.filename} is compressed")
                if member.CRC == 0 and member.file_size:
                    num_unsummed = 1
                else:
                    archive.read(member)
    except (DamagedError, StorageError) as error:
        return BytesReport((_finding(job, chunk, str(error), locator.offset),))
    except ZIP_ERRORS as error:
        return BytesReport((_finding(job, chunk, f"not a whole torch.save archive ({error})", locator.offset),))
    if job.report:
        job.report(locator.length)
    return BytesReport(num_chunks=1, num_bytes=locator.length, num_unsummed=num_unsummed)
