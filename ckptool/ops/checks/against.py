"""Is it bit for bit the same as another checkpoint, in whatever format and sharding that is?"""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.core.checkpoint import Manifest
from ckptool.core.findings import Finding
from ckptool.core.interfaces import Progress, Source
from ckptool.errors import DamagedError, name_some
from ckptool.ops.checks import next_steps
from ckptool.ops.pairs import element_position, first_difference, pair_up, read_pairs, same_bytes, same_object
from ckptool.storage.files import Place


def check_against(
    folder: Place, source: Source, other: Source, model_only: bool, report: Progress | None = None
) -> tuple[list[Finding], int]:
    """Compare names, dtypes, shapes and bytes, and objects by their values. `folder` is where `source` lies.

    Returns the findings and how many tensors have the same bytes on both sides.
    """
    src = other.manifest.location
    pairs = pair_up(source.manifest, other.manifest, model_only=model_only)
    step = f"{next_steps.compare(folder, src)} --top 20"
    findings = [
        *(Finding("mismatched", f"{fqn} is not in {src}", fqn, next_step=step) for fqn in pairs.only_one),
        *(Finding("mismatched", f"{fqn} is only in {src}", fqn, next_step=step) for fqn in pairs.only_other),
    ]
    num_equal = 0
    cast = _cast(source.manifest, other.manifest, pairs.both)
    for (dtype, there), fqns in cast.items():
        message = f"{len(fqns)} tensors are {dtype}, and {there} in {src}: {name_some(fqns)}"
        findings.append(Finding("mismatched", message, fqns[0], next_step=step))
    grouped = {fqn for fqns in cast.values() for fqn in fqns}
    for fqn in pairs.both:
        if fqn in grouped:
            continue
        try:
            difference = _difference(source, other, fqn, report)
        except DamagedError as error:
            copy = next_steps.another_copy(folder, source.manifest)
            difference = Finding("corrupt", f"tensor {fqn}: {error}", fqn, next_step=copy)
        if difference is None:
            num_equal += 1
        else:
            findings.append(difference)
    for fqn in pairs.objects:
        if not same_object(source, other, fqn):
            step = next_steps.compare(folder, src, fqn)
            findings.append(Finding("mismatched", f"object {fqn} differs from that of {src}", fqn, next_step=step))
    return findings, num_equal


def _cast(one: Manifest, other: Manifest, fqns: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Tensors that differ in dtype and not in shape, by both dtypes, where there are several: one finding for all."""
    found: dict[tuple[str, str], list[str]] = {}
    for fqn in fqns:
        entry, counterpart = one.tensors[fqn], other.tensors[fqn]
        if entry.shape == counterpart.shape and entry.dtype != counterpart.dtype:
            found.setdefault((entry.dtype, counterpart.dtype), []).append(fqn)
    return {dtypes: names for dtypes, names in found.items() if len(names) > 1}


def _difference(source: Source, other: Source, fqn: str, report: Progress | None) -> Finding | None:
    src = other.manifest.location
    entry, counterpart = source.manifest.tensors[fqn], other.manifest.tensors[fqn]
    step = next_steps.compare(source.manifest.location, src, fqn)
    if (entry.dtype, entry.shape) != (counterpart.dtype, counterpart.shape):
        message = f"{fqn} is {entry.dtype} {list(entry.shape)}, in {src} {counterpart.dtype} {list(counterpart.shape)}"
        return Finding("mismatched", message, fqn, next_step=step)
    for box, here, there in read_pairs(source, other, fqn):
        if report:
            report(len(here))
        if not same_bytes(here, there):
            place = element_position(box, first_difference(here, there, entry.itemsize_bytes))
            return Finding("mismatched", f"{fqn} differs from that of {src}, first at {place}", fqn, next_step=step)
    return None
