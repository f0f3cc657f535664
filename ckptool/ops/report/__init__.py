"""One page about a run and a checkpoint that opens in any browser, offline: `report` gathers, draws and writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ckptool.core.interfaces import Progress
from ckptool.core.plan import Result
from ckptool.errors import UsageError
from ckptool.ops.report.contents import Contents, Wanted, gather
from ckptool.storage.files import Place
from ckptool.storage.staging import refuse_existing, staged_file


def report(
    name: str,
    *,
    out: Path,
    against: str | None = None,
    root: Place | None = None,
    work_dir: Place | None = None,
    keys: str = "*",
    level: str = "structure",
    values: bool = True,
    overwrite: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Result:
    """Write an HTML page about `name` to the file `out`: a run root, a checkpoint, or a Hugging Face folder.

    A run whose root is in a store has its metrics.jsonl in `work_dir`.

    `against` names another checkpoint or Hugging Face folder whose difference is shown. `keys` is a glob for the
    tensors whose values are read and whose parts are listed; with `values` off no tensor is read at all. `level` is
    that of `verify`. `progress(total bytes)` gives the counter of bytes read.

    Damage is shown on the page, not raised. Raises NotFoundError, TargetExistsError, UsageError, UnsafeError, and
    UnsupportedError when the libraries of `ckptool[report]` are not installed.
    """
    start = time.monotonic()
    if against is not None and not values:
        raise UsageError("--against compares values, and --no-values reads none")
    from ckptool.ops.report.page import check_libraries, render

    check_libraries()
    refuse_existing(out, overwrite, is_file=True)
    contents = gather(name, Wanted(against, root, work_dir, keys, level, values, progress))
    page = render(contents).encode("utf-8")
    with staged_file(out, overwrite) as staging:
        staging.write_bytes(page)
    seconds = time.monotonic() - start
    return Result("report", str(out), None, True, seconds, tuple(contents.notes), _facts(contents, len(page)))


def _facts(contents: Contents, num_bytes: int) -> dict[str, object]:
    subject, steps, manifest = contents.subject, contents.steps, contents.manifest
    return {
        "checkpoint": str(subject.checkpoint) if subject.checkpoint else None,
        "run": str(subject.run) if subject.run else None,
        "num_steps": len(steps.kept) if steps else 0,
        "num_attempts": len(steps.attempts) if steps else 0,
        "num_tensors": len(manifest.tensors) if manifest else 0,
        "num_chunks": manifest.num_chunks if manifest else 0,
        "num_findings": len(contents.verification.findings) if contents.verification else 0,
        "page_bytes": num_bytes,
    }
