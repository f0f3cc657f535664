"""Are the tensors those that were written, and are their numbers finite? One walk over the elements for both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptool.core.findings import Finding
from ckptool.core.interfaces import Progress, Source
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError
from ckptool.ops.blocks import in_threads, num_workers, read_blocks, reading_ahead
from ckptool.ops.checks import next_steps
from ckptool.ops.floats import count_not_finite
from ckptool.storage.digest import TensorDigest, digest_box
from ckptool.storage.digests_file import Digests
from ckptool.storage.fetch_ahead import FetchAhead
from ckptool.storage.files import Place


@dataclass(frozen=True)
class ValueChecks:
    """What to look at: compare with `digests` where they list the tensor, count NaN and Inf when `finite`."""

    folder: Place
    next_step: str
    digests: Digests | None = None
    finite: bool = False
    report: Progress | None = None


def check_values(
    open_source: Callable[[], Source], fqns: Sequence[str], checks: ValueChecks, workers: int = 0
) -> list[Finding]:
    """Read the tensors `fqns` whole, spread over threads that each open the source for themselves."""
    workers = min(workers or num_workers(), len(fqns))

    def work(share: Sequence[str]) -> list[Finding]:
        with contextlib.closing(open_source()) as source, reading_ahead(source, share) as ahead:
            return [finding for fqn in share for finding in _check_tensor(source, fqn, checks, ahead)]

    shares = [fqns[start::workers] for start in range(workers)]
    return [finding for found in in_threads(work, shares, workers) for finding in found]


def _check_tensor(source: Source, fqn: str, checks: ValueChecks, ahead: FetchAhead) -> list[Finding]:
    entry = source.manifest.tensors[fqn]
    recorded = checks.digests.tensors.get(fqn) if checks.digests else None
    digest, num_nan, num_inf = TensorDigest(), 0, 0
    try:
        for box, data in read_blocks(source, entry, ahead):
            if recorded is not None:
                digest += digest_box(data, box, entry.shape, entry.itemsize_bytes)
            if checks.finite:
                nan, inf = count_not_finite(data, entry.dtype)
                num_nan, num_inf = num_nan + nan, num_inf + inf
            if checks.report:
                checks.report(len(data))
    except DamagedError as error:
        return [Finding("corrupt", f"tensor {fqn}: {error}", fqn, *_place(entry), checks.next_step)]
    findings = []
    if recorded is not None and digest != recorded.digest:
        message = f"tensor {fqn} is not what was written: its digest is {digest}, recorded is {recorded.digest}"
        findings.append(Finding("corrupt", message, fqn, *_place(entry), checks.next_step))
    if num_nan or num_inf:
        message = f"tensor {fqn} has {num_nan} NaN and {num_inf} infinite among {entry.num_elements} elements"
        findings.append(Finding("not-finite", message, fqn, next_step=next_steps.another_copy(checks.folder, None)))
    return findings


def _place(entry: TensorEntry) -> tuple[str, int]:
    """The file and offset of a tensor's first chunk."""
    locator = entry.chunks[0].locator if entry.chunks else None
    return (locator.file, locator.offset) if locator else ("", -1)
