"""Collective save and load of a training state: published whole or not at all, and all ranks agree on the outcome."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ckptool.core.position import DataPosition
from ckptool.core.provenance import Provenance
from ckptool.errors import CkptoolError, DistributedError, MismatchError, NotFoundError, name_some
from ckptool.formats.dcp_adapters import LoadReader, LoadStatePlanner, SaveStatePlanner, SaveWriter
from ckptool.formats.dcp_metadata import PROVENANCE_FILE
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.hf_folder import EXTRA_NAME, copy_side_files, side_files
from ckptool.load_check import check_loaded, uneven_reads
from ckptool.ranks import Ranks
from ckptool.shared_target import SharedTarget
from ckptool.storage.digests_file import read_digests
from ckptool.storage.files import Place, os_errors, write_json
from ckptool.storage.place import place
from ckptool.template import Template, TemplateCheck

POSITION_FILE = "data_position.json"
SIDE_FOLDER = "hf"

#: Plain tensors up to this size are compared between ranks before a save.
MAX_COMPARED_BYTES = 1 << 20


def save(
    state_dict: dict[str, Any],
    target: Place | str,
    *,
    provenance: Provenance,
    ties: Mapping[str, str] | None = None,
    side_folder: Path | None = None,
    position: DataPosition | Mapping[str, Any] | None = None,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save `state_dict` (nested dicts of DTensors, tensors and plain values) as the checkpoint `target`, a path or URL.

    All ranks of `process_group` call it with the same arguments; without a process group, one process saves alone.
    `ties` maps alias fqns to the fqns, both as in the checkpoint (`model.` and all), whose bytes they share; the
    aliases themselves are not in `state_dict`. `side_folder` is copied to `hf/`, `position` written for people.
    With `overwrite` a checkpoint at `target` is replaced, at the moment when the new one is safe on the disk. Of a URL
    each rank brings up its own files from a temporary folder, and the old one is gone as soon as that begins.

    Raises, on every rank, TargetExistsError when `target` is taken, LockedError when another process is writing it,
    MismatchError when the ranks hold different values for one name, DistributedError when any rank failed to write;
    the message names that rank and its cause. `target` then is as it was, and nothing else was touched.
    """
    ranks = Ranks(process_group)
    target = place(target)
    action = f"saving {target}"
    check_same_values(ranks, action, lambda: Template(state_dict).values)
    shared = SharedTarget(target, overwrite, ranks, action)
    try:
        ranks.on_first(action, lambda: write_sidecars(shared.content, provenance, side_folder, position))
        writer = SaveWriter(shared.content, ties or {})
        _write(state_dict, writer, ranks, action)
        shared.sent(writer.written())
        shared.publish()
    except BaseException:
        shared.discard()
        raise


def load(
    state_dict: dict[str, Any],
    source: Place | str,
    *,
    process_group: dist.ProcessGroup | None = None,
    allow_cast: bool = False,
    allow_missing: Collection[str] = (),
    ignore: Collection[str] = (),
) -> None:
    """Fill `state_dict` in place from the checkpoint `source`, a folder or URL, saved on any number of ranks.

    Names, shapes and dtypes are compared with the checkpoint's metadata before any tensor byte is read. The template's
    top-level keys choose the sections that must match whole: `{"model": ...}` ignores the checkpoint's `optim`.
    `allow_missing` are fqns that the checkpoint may lack, `ignore` prefixes of names in the checkpoint that are not
    wanted, `allow_cast` permits loading into another floating-point dtype that holds all numbers.

    What was read is compared with the checkpoint's digests before this returns.

    Raises, on every rank, MismatchError listing what differs; DamagedError, UnsafeError or NotFoundError for a
    checkpoint that can't be read; DistributedError when a rank failed while reading: the contents of `state_dict` are
    then undefined.
    """
    ranks = Ranks(process_group)
    source = place(source)
    action = f"loading {source}"
    checkpoint = ranks.agree(action, lambda: DcpSource(source))
    with contextlib.closing(checkpoint):
        digests = ranks.agree(action, lambda: read_digests(source, checkpoint.manifest.save_id))
        checkpoint.check_crc = digests is None
        check = TemplateCheck(allow_cast, allow_missing, ignore)
        ranks.agree(action, lambda: check.run(Template(state_dict), checkpoint.manifest))
        reader, planner = LoadReader(checkpoint), LoadStatePlanner()
        if digests is not None:
            reads = ranks.agree(action, lambda: planner.reads(state_dict, reader.read_metadata()))
            reader.uneven = uneven_reads(reads, checkpoint.manifest, ranks, action)
        ranks.agree(action, lambda: _read(state_dict, reader, planner))
        if digests is not None:
            check_loaded(checkpoint, digests, reader.digests(), ranks, action)


def _read(state_dict: dict[str, Any], reader: LoadReader, planner: LoadStatePlanner) -> None:
    """Fill this rank's part. The plans of all ranks, at times a million items, are nobody's to know."""
    try:
        with _quiet_alone():
            dcp.load(state_dict, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise cause from error


def _write(state_dict: dict[str, Any], writer: SaveWriter, ranks: Ranks, action: str) -> None:
    with _write_errors(action), ranks.dcp_step(action), _quiet_alone():
        dcp.save(
            state_dict,
            storage_writer=writer,
            planner=SaveStatePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.is_distributed,
        )


def write_sidecars(
    folder: Path,
    provenance: Provenance,
    side_folder: Path | None,
    position: DataPosition | Mapping[str, Any] | None,
) -> None:
    """Make the folder of a checkpoint with all that stands beside the tensors. Raises NotFoundError without its side
    files, StorageError."""
    with os_errors(folder):
        folder.mkdir()
    write_json(folder / PROVENANCE_FILE, provenance.to_json())
    if position is not None:
        record = position.to_dict() if isinstance(position, DataPosition) else dict(position)
        write_json(folder / POSITION_FILE, record)
    if side_folder is not None:
        if not side_folder.is_dir():
            raise NotFoundError(
                f"{side_folder} is gone, and {folder.name} would lack its files",
                hint="was the checkpoint that the run began from removed?",
            )
        extra = [EXTRA_NAME] if (side_folder / EXTRA_NAME).exists() else []
        copy_side_files(side_folder, folder / SIDE_FOLDER, [*side_files(side_folder), *extra])


def value_digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """A digest per value that DCP stores once although every rank has it: plain values and small plain tensors."""
    return {fqn: _digest(value) for fqn, value in flat.items() if not isinstance(value, DTensor)}


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, int | float | str | bytes | bool | None) else type(value).__name__
    content = ""
    if value.device.type != "meta" and 0 < value.nbytes <= MAX_COMPARED_BYTES:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = hashlib.sha256(raw.data).hexdigest()
    return f"{value.dtype} {list(value.shape)} {content}"


def check_same_values(ranks: Ranks, action: str, values: Callable[[], Mapping[str, Any]]) -> None:
    """Raise MismatchError, on every rank, naming what is not the same on all ranks that hold it.

    A hash of all is compared first: of 10,000 ranks it is one MB, where the digests of a model's plain values are 500.
    """
    digests = ranks.agree(action, lambda: value_digests(values()))
    fingerprint = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()
    if len(set(ranks.gather(fingerprint, action))) > 1:
        _compare(ranks.gather(digests, action))


def _compare(digests: Sequence[Mapping[str, str]]) -> None:
    """What `value_digests` gave on each rank."""
    seen: dict[str, set[str]] = {}
    for of_rank in digests:
        for fqn, digest in of_rank.items():
            seen.setdefault(fqn, set()).add(digest)
    differing = {fqn for fqn, values in seen.items() if len(values) > 1}
    if differing:
        raise MismatchError(
            f"the ranks hold different values under one name, and only one would be kept: {name_some(differing)}",
            hint="put the rank into the name, or give all ranks the same value",
        )


@contextlib.contextmanager
def _write_errors(action: str) -> Iterator[None]:
    """A failed write is a DistributedError, whatever class its cause has."""
    try:
        yield
    except DistributedError:
        raise
    except CkptoolError as error:
        raise DistributedError(f"{action} failed: {error}", error.hint) from error


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """DCP warns when it runs without a process group; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
