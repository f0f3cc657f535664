"""Is a checkpoint what was written, and is it sound? In levels, each of which includes the ones before it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.checkpoint import Manifest
from ckptool.core.findings import Finding, exit_code
from ckptool.core.interfaces import Progress
from ckptool.core.plan import Result
from ckptool.errors import DamagedError, MismatchError, UsageError
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.hf_config import main_dtype
from ckptool.formats.sharded_safetensors import ShardedSafetensors, is_sharded_folder
from ckptool.ops.checks import next_steps
from ckptool.ops.checks.hf_folder import check_hf_folder, config_dtype
from ckptool.ops.checks.shard_shapes import check_shard_shapes
from ckptool.ops.checks.stored_bytes import check_bytes
from ckptool.ops.checks.structure import Structure, check_structure
from ckptool.ops.checks.values import ValueChecks, check_values
from ckptool.ops.inputs import open_weights
from ckptool.ops.sources import compare_models_only, find_hf, open_any
from ckptool.runs import resolve
from ckptool.storage.files import Place
from ckptool.storage.place import files_below
from ckptool.storage.store import shown_name

LEVELS = ("structure", "bytes", "content")


@dataclass(frozen=True)
class Verification(Result):
    """What `verify` found; good when there are no findings. `details` say what was checked."""

    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """4 when anything is damaged, else 3 when anything differs, else 0."""
        return exit_code(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "good": not self.findings,
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass
class _Checked:
    """What the checks add up to. `num_bytes` counts every byte read, those of two passes twice."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    num_tensors: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class _Wanted:
    """The options of `verify`."""

    level: str
    against: str | None
    finite: bool
    part: tuple[int, int]
    root: Place | None
    progress: Callable[[int], Progress] | None


def verify(
    name: str | Place,
    *,
    root: Place | None = None,
    level: str = "bytes",
    against: str | None = None,
    finite: bool = False,
    subset: str = "1/1",
    progress: Callable[[int], Progress] | None = None,
) -> Verification:
    """Check the checkpoint `name` (a path, a name under `root`, `latest`) or Hugging Face folder.

    `level` "structure" reads metadata and sizes; "bytes" every file, against `digests.json` or the checksums that torch
    wrote; "content" recomputes the digest of every tensor. `subset` "k/n" limits "bytes" to the k-th of n parts.
    `against` names another checkpoint or Hugging Face folder to be bit-equal to; `finite` counts NaN and Inf.
    `progress(total bytes)` gives the counter of bytes read.

    Damage is reported as findings, not raised. Raises NotFoundError, UsageError, UnsafeError, UnsupportedError.
    """
    start = time.monotonic()
    if level not in LEVELS:
        raise UsageError(f"--level {level}: choose one of {', '.join(LEVELS)}")
    wanted = _Wanted(level, against, finite, parse_subset(subset), root, progress)
    if wanted.part[1] > 1 and level != "bytes":
        raise UsageError("--subset goes with --level bytes")
    hub_form = find_hf(name, root)
    path = hub_form or resolve(name, root)
    checked = _check_hf(path, wanted) if hub_form else _check_checkpoint(path, wanted)
    seconds = time.monotonic() - start
    details = {
        "level": level,
        "against": None if against is None else shown_name(against),
        "subset": f"{wanted.part[0]}/{wanted.part[1]}",
        "finite": finite,
        "num_files": checked.num_files,
        "num_tensors": checked.num_tensors,
        "num_bytes": checked.num_bytes,
    }
    return Verification(
        "verify", str(path), None, True, seconds, tuple(checked.notes), details, tuple(checked.findings)
    )


def parse_subset(text: str) -> tuple[int, int]:
    """`2/10` -> (2, 10): the second of ten parts. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    k, n = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= k <= n:
        raise UsageError(f"--subset {text}: write K/N, like 1/10 for the first of ten parts")
    return k, n


def _check_checkpoint(path: Place, wanted: _Wanted) -> _Checked:
    structure = check_structure(path)
    manifest = structure.manifest
    checked = _Checked(findings=list(structure.findings), num_files=sum(1 for _ in files_below(path)))
    if manifest is None:
        return checked
    checked.num_tensors = len(manifest.tensors)
    checked.notes += _config_note(path, manifest)
    if wanted.level != "structure":
        _check_bytes(path, manifest, structure, wanted, checked)
    if wanted.level == "content" or wanted.finite:
        _check_content(path, manifest, structure, wanted, checked)
    if wanted.against is not None:
        _check_against(path, wanted, checked)
    return checked


def _check_bytes(path: Place, manifest: Manifest, structure: Structure, wanted: _Wanted, checked: _Checked) -> None:
    if structure.digests is None:
        checked.notes.append("no digests to compare with: chunks are checked by the checksums that torch wrote")
    lost = frozenset(f.file for f in structure.findings if f.file and f.kind in ("missing", "truncated"))
    total_bytes = sum(size for file, size in manifest.files.items() if file not in lost) // wanted.part[1]
    report = wanted.progress(total_bytes) if wanted.progress else None
    found = check_bytes(path, manifest, structure.digests, lost, wanted.part, report)
    checked.findings += found.findings
    checked.num_files, checked.num_bytes = found.num_files, found.num_bytes
    if found.num_unsummed:
        checked.notes.append(f"{found.num_unsummed} chunks were written without a checksum: they could not be checked")


def _check_content(path: Place, manifest: Manifest, structure: Structure, wanted: _Wanted, checked: _Checked) -> None:
    """Recompute digests where there are any, and count what is not finite; tensors known to be damaged are left out."""
    digests = structure.digests if wanted.level == "content" else None
    if wanted.level == "content" and digests is None:
        checked.notes.append("no digests to compare the tensors with; --against SRC compares with another checkpoint")
    damaged = {finding.tensor for finding in checked.findings if finding.tensor}
    stored = {fqn for fqn in manifest.tensors if fqn not in manifest.ties}
    names = stored if wanted.finite else set()
    names |= set(digests.tensors) & set(manifest.tensors) if digests else set()
    fqns = [fqn for fqn in manifest.tensors if fqn in names - damaged]
    num_bytes = sum(manifest.tensors[fqn].num_bytes for fqn in fqns)
    report = wanted.progress(num_bytes) if wanted.progress and fqns else None
    step = next_steps.another_copy(path, manifest)
    try:
        checked.findings += check_values(
            lambda: DcpSource(path), fqns, ValueChecks(path, step, digests, wanted.finite, report)
        )
    except DamagedError as error:
        _note_skipped(checked, error)
    checked.num_bytes += num_bytes


def _check_against(path: Place, wanted: _Wanted, checked: _Checked) -> None:
    """Compare with another checkpoint; with the model's tensors alone where the two sides have other kinds of names."""
    from ckptool.ops.checks.against import check_against

    src = str(wanted.against)
    model_only = compare_models_only([src, path], wanted.root)
    with contextlib.closing(open_any(src, wanted.root, model_only=model_only)) as other:
        try:
            source = open_any(path, model_only=model_only)
        except DamagedError as error:
            _note_skipped(checked, error)
            return
        with contextlib.closing(source):
            report = wanted.progress(source.manifest.num_bytes) if wanted.progress else None
            findings, num_equal = check_against(path, source, other, model_only, report)
            checked.num_bytes += source.manifest.num_bytes
    checked.findings += findings
    what = "tensors of the model" if model_only else "tensors"
    checked.notes.append(f"{num_equal} {what} are bit for bit those of {shown_name(src)}")


def _note_skipped(checked: _Checked, error: DamagedError) -> None:
    checked.notes.append(f"the tensors were not compared, since the checkpoint can't be read as a whole: {error}")


def _config_note(path: Place, manifest: Manifest) -> list[str]:
    """A trained checkpoint may well hold float32 beside a bfloat16 config; its exports say what they hold."""
    said = config_dtype(path / "hf" / "config.json")
    held = main_dtype(entry for fqn, entry in manifest.tensors.items() if fqn.startswith("model."))
    if said and held and said != held:
        return [
            f"hf/config.json says {said}, and the model's tensors are {held}; an export's config follows the tensors"
        ]
    return []


def _check_hf(path: Place, wanted: _Wanted) -> _Checked:
    tensors, findings = check_hf_folder(path)
    files = {chunk.locator.file for entry in tensors.values() for chunk in entry.chunks if chunk.locator}
    checked = _Checked(findings, num_files=len(files), num_tensors=len(tensors))
    if tensors and path.is_dir() and is_sharded_folder(path):
        _check_shards(path, checked)
    if wanted.level != "structure":
        checked.notes.append("safetensors files carry no checksums: structure checked only; --against SRC checks bytes")
    if wanted.finite:
        total_bytes = sum(entry.num_bytes for entry in tensors.values())
        report = wanted.progress(total_bytes) if wanted.progress else None
        checks = ValueChecks(path, next_steps.another_copy(path, None), None, True, report)
        try:
            with contextlib.closing(open_weights(path)) as source:
                fqns = list(source.manifest.tensors)
            checked.findings += check_values(lambda: open_weights(path), fqns, checks)
            checked.num_bytes += total_bytes
        except DamagedError as error:
            _note_skipped(checked, error)
    if wanted.against is not None:
        _check_against(path, wanted, checked)
    return checked


def _check_shards(path: Place, checked: _Checked) -> None:
    """The ranks' parts make whole tensors; are these of the shapes that the config wants?"""
    step = next_steps.another_copy(path, None)
    try:
        with contextlib.closing(ShardedSafetensors(path)) as source:
            checked.notes += check_shard_shapes(source)
    except MismatchError as error:
        checked.findings.append(Finding("mismatched", f"{error} ({error.hint})", file="config.json", next_step=step))
    except DamagedError as error:
        checked.findings.append(Finding("corrupt", str(error), file="config.json", next_step=step))
