"""Does what all ranks have read add up to what was written? Digests are sums, so each rank adds up its own part.

Reads of parts of a chunk have no checksum of their own: after a change of world size this is what finds a flipped bit.
Tensors of which the ranks read some elements more often than others don't add up; LoadReader checks those as it reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ckptool.core.checkpoint import Manifest
from ckptool.errors import DamagedError, name_some
from ckptool.formats.dcp_entry import read_entry
from ckptool.formats.dcp_source import DcpSource
from ckptool.ranks import Ranks
from ckptool.storage.digest import TensorDigest
from ckptool.storage.digests_file import Digests

_SIGN = 1 << 63
_MODULUS = 1 << 64


def check_loaded(
    checkpoint: DcpSource,
    digests: Digests,
    read: Mapping[str, tuple[TensorDigest, int]],
    ranks: Ranks,
    action: str,
) -> None:
    """Compare with `digests` what the ranks read: per fqn, this rank's sum and how many elements it is over.

    A tensor read R times over all ranks (replicas, plain tensors) must give R times its digest. Raises DamagedError on
    every rank, naming tensor, file and place.
    """
    manifest = checkpoint.manifest
    fqns = sorted(fqn for fqn in digests.tensors if fqn in manifest.tensors)
    totals = _sum_over_ranks([read.get(fqn, (TensorDigest(), 0)) for fqn in fqns], ranks, action)
    wrong = [fqn for fqn, total in zip(fqns, totals, strict=True) if _differs(manifest, digests, fqn, total)]
    if wrong:
        ranks.on_first(action, lambda: _explain(checkpoint, wrong))


def _differs(manifest: Manifest, digests: Digests, fqn: str, total: tuple[TensorDigest, int]) -> bool:
    digest, num_read = total
    num_elements = manifest.tensors[fqn].num_elements
    copies = num_read // num_elements if num_elements else 0
    written = digests.tensors[fqn].digest
    return digest.lanes != tuple(lane * copies % _MODULUS for lane in written.lanes)


def _sum_over_ranks(parts: list[tuple[TensorDigest, int]], ranks: Ranks, action: str) -> list[tuple[TensorDigest, int]]:
    """Element by element over the ranks; 64-bit integers wrap as the digest's arithmetic does."""
    if not ranks.is_distributed or not parts:
        return parts
    rows = [[_signed(digest.lanes[0]), _signed(digest.lanes[1]), count] for digest, count in parts]
    has_cpu = "cpu:" in dist.get_backend_config(ranks.group)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu" if has_cpu else "cuda")
    with ranks.lost_contact(action):
        dist.all_reduce(table, group=ranks.group)
    return [(TensorDigest((a % _MODULUS, b % _MODULUS)), count) for a, b, count in table.tolist()]


def _signed(lane: int) -> int:
    return lane - _MODULUS if lane >= _SIGN else lane


def _explain(checkpoint: DcpSource, wrong: list[str]) -> None:
    """Find the stored chunk at fault by its CRC. Always raises DamagedError."""
    location = checkpoint.manifest.location
    hint = f"ckptool verify {location} tells more; use another checkpoint, or restore the file from a copy"
    for fqn in wrong:
        for chunk in checkpoint.manifest.tensors[fqn].chunks:
            if chunk.locator is None:
                continue
            stored = read_entry(checkpoint.reader, chunk.locator)
            payload = checkpoint.reader.read(chunk.locator.file, stored.payload_offset, stored.payload_bytes)
            if stored.crc32 and zlib.crc32(payload) != stored.crc32:
                raise DamagedError(
                    f"{fqn} has changed since it was written: {location}/{chunk.locator.file}, the "
                    f"{stored.payload_bytes} bytes at {stored.payload_offset}",
                    hint,
                )
    raise DamagedError(f"{location}: {name_some(wrong)} changed since they were written", hint)
