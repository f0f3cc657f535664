"""Is everything there, with the right size, described without contradiction? Reads no tensor byte, needs no torch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from ckptool.core.checkpoint import Manifest
from ckptool.core.findings import Finding
from ckptool.core.tensors import Locator
from ckptool.errors import DamagedError, name_some
from ckptool.formats.dcp_metadata import (
    METADATA_FILE,
    PROVENANCE_FILE,
    check_sizes,
    parse_manifest,
    read_provenance,
)
from ckptool.ops.checks import next_steps
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, FileDigest, read_digests
from ckptool.storage.files import Place, safe_join
from ckptool.storage.place import files_below


@dataclass(frozen=True)
class Structure:
    """What the structure check found. `manifest` is None when `.metadata` can't be used, `digests` when there are
    none or they can't be trusted."""

    manifest: Manifest | None
    digests: Digests | None
    findings: tuple[Finding, ...]


def check_structure(folder: Place) -> Structure:
    """Check a DCP checkpoint folder by its descriptions and its files' sizes.

    Raises NotFoundError when `folder` is no checkpoint, UnsafeError when it wants to run code or to reach outside.
    """
    findings: list[Finding] = []
    provenance, manifest, digests = None, None, None
    try:
        provenance = read_provenance(folder)
    except DamagedError as error:
        findings.append(_from_error(error, folder, PROVENANCE_FILE, None))
    try:
        manifest = parse_manifest(folder, provenance)
    except DamagedError as error:
        findings.append(_from_error(error, folder, METADATA_FILE, None))
        return Structure(None, None, tuple(findings))
    try:
        digests = read_digests(folder, manifest.save_id)
    except DamagedError as error:
        findings.append(_from_error(error, folder, DIGESTS_FILE, manifest))
    faults = [*_manifest_faults(folder, manifest), *_shared_bytes(folder, manifest)]
    faults += _unexpected(folder, manifest, digests)
    if digests is not None:
        described = {(fault.kind, fault.file) for fault in faults}
        recorded = _against_digests(folder, manifest, digests)
        faults += [fault for fault in recorded if (fault.kind, fault.file) not in described or fault.tensor]
    return Structure(manifest, digests, (*findings, *faults))


def data_locators(manifest: Manifest) -> dict[Locator, str]:
    """Every stored byte range and the fqn it belongs to; a tie's is the canonical name's."""
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if fqn not in manifest.ties}
    return {
        **{chunk.locator: fqn for fqn, entry in tensors.items() for chunk in entry.chunks if chunk.locator},
        **{item.locator: fqn for fqn, item in manifest.objects.items() if item.locator},
    }


def _from_error(error: DamagedError, folder: Place, file: str, manifest: Manifest | None) -> Finding:
    there = (folder / file).exists()
    kind = error.kind if there else "missing"
    return Finding(kind, str(error), file=file, next_step=next_steps.another_copy(folder, manifest))  # type: ignore[arg-type]


def _manifest_faults(folder: Place, manifest: Manifest) -> list[Finding]:
    """What the manifest objects to, one finding a file where a file is at fault, however many tensors need it."""
    by_place: dict[tuple[str, str], list[Finding]] = {}
    for number, fault in enumerate(manifest.faults()):
        by_place.setdefault((fault.kind, fault.file or str(number)), []).append(fault)
    findings = []
    for (kind, file), faults in by_place.items():
        first = min(faults, key=lambda fault: fault.offset_bytes)
        message, step = first.message, next_steps.another_copy(folder, manifest)
        if first.file:
            message = _file_message(kind, file, name_some({fault.tensor for fault in faults}, 3), manifest)
        findings.append(Finding(first.kind, message, first.tensor, first.file, first.offset_bytes, step))
    if not findings:
        try:
            check_sizes(manifest)
        except DamagedError as error:
            findings.append(_from_error(error, folder, METADATA_FILE, manifest))
    return findings


def _file_message(kind: str, file: str, names: str, manifest: Manifest) -> str:
    if kind == "missing":
        return f"{file} is not there; it holds {names}"
    if kind == "truncated":
        return f"{file} ends at byte {manifest.files[file]}, before all of {names}"
    return f"{file}: impossible byte ranges for {names}"


def _shared_bytes(folder: Place, manifest: Manifest) -> Iterator[Finding]:
    """Different stored ranges that share bytes. Equal ranges are ties."""
    furthest: dict[str, tuple[int, str]] = {}
    places = data_locators(manifest)
    for locator in sorted(places, key=operator.attrgetter("file", "offset", "length")):
        if locator.length <= 0:
            continue
        end, other = furthest.get(locator.file, (0, ""))
        if locator.offset < end:
            yield Finding(
                "overlapping",
                f"{places[locator]} and {other} share bytes of {locator.file} from {locator.offset} on",
                places[locator],
                locator.file,
                locator.offset,
                next_steps.another_copy(folder, manifest),
            )
        furthest[locator.file] = max((end, other), (locator.offset + locator.length, places[locator]))


def _unexpected(folder: Place, manifest: Manifest, digests: Digests | None) -> Iterator[Finding]:
    """Files that nothing accounts for: all of them where digests list what was written, else data files only."""
    for name in files_below(folder):
        known = name in manifest.files or name == DIGESTS_FILE
        if digests is not None:
            known |= name in digests.files
        else:
            known |= not name.endswith(".distcp")
        if not known:
            message = f"{name} belongs to nothing in this checkpoint"
            yield Finding("unexpected", message, file=name, next_step=next_steps.look_at_file(folder / name))


def _against_digests(folder: Place, manifest: Manifest, digests: Digests) -> Iterator[Finding]:
    """Files and tensors must be those that digests.json lists."""
    for name, recorded in digests.files.items():
        yield from _file_size(folder, name, recorded, manifest)
    for file in sorted(set(manifest.files) - set(digests.files)):
        message = f"{file} holds data, and {DIGESTS_FILE} does not list it"
        yield Finding("unexpected", message, file=file, next_step=next_steps.another_copy(folder, manifest))
    step = next_steps.another_copy(folder, manifest)
    for fqn, record in digests.tensors.items():
        entry = manifest.tensors.get(fqn)
        if entry is None:
            message = f"{METADATA_FILE} lacks {fqn}, which {DIGESTS_FILE} lists"
            yield Finding("missing", message, fqn, METADATA_FILE, next_step=step)
        elif (entry.dtype, entry.shape) != (record.dtype, record.shape):
            message = (
                f"{fqn} is {entry.dtype} {list(entry.shape)} in {METADATA_FILE}, "
                f"and was written as {record.dtype} {list(record.shape)}"
            )
            yield Finding("corrupt", message, fqn, METADATA_FILE, next_step=step)
    for fqn in sorted(set(manifest.tensors) - set(digests.tensors) - set(_tied_to(manifest, digests))):
        message = f"{METADATA_FILE} has {fqn}, which {DIGESTS_FILE} does not list"
        yield Finding("unexpected", message, fqn, METADATA_FILE, next_step=step)


def _tied_to(manifest: Manifest, digests: Digests) -> Iterator[str]:
    """Names that share the bytes of a listed tensor, whichever of them the manifest takes for the alias."""
    listed = {manifest.ties.get(fqn, fqn) for fqn in digests.tensors}
    for alias, canonical in manifest.ties.items():
        if canonical in listed:
            yield from (alias, canonical)


def _file_size(folder: Place, name: str, recorded: FileDigest, manifest: Manifest) -> Iterator[Finding]:
    path = safe_join(folder, name)
    step = next_steps.another_copy(folder, manifest)
    if not path.is_file():
        yield Finding("missing", f"{name} is not there", file=name, next_step=step)
        return
    size = path.stat().st_size
    if size < recorded.num_bytes:
        message = f"{name} ends at byte {size}, {recorded.num_bytes - size} bytes before its end"
        yield Finding("truncated", message, file=name, offset_bytes=size, next_step=step)
    elif size > recorded.num_bytes:
        message = f"{name} has {size} bytes, and was written with {recorded.num_bytes}"
        yield Finding("corrupt", message, file=name, offset_bytes=recorded.num_bytes, next_step=step)
