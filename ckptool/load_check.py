"""Does what all ranks have read add up to what was written? Digests are sums, so each rank adds up its own part.

So is the answer to whether they read every element equally often: no rank needs to know what another reads.

Reads of parts of a chunk have no checksum of their own: after a change of world size this is what finds a flipped bit.
Tensors of which the ranks read some elements more often than others don't add up; LoadReader checks those as it reads.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ckptool.core.box import Box
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
    own = [read.get(fqn, (TensorDigest(), 0)) for fqn in fqns]
    totals = _sum_over_ranks([[*digest.lanes, count] for digest, count in own], ranks, action)
    wrong = [fqn for fqn, total in zip(fqns, totals, strict=True) if _differs(manifest, digests, fqn, total)]
    if wrong:
        ranks.on_first(action, lambda: _explain(checkpoint, wrong))


def _differs(manifest: Manifest, digests: Digests, fqn: str, total: list[int]) -> bool:
    *lanes, num_read = total
    num_elements = manifest.tensors[fqn].num_elements
    copies = num_read // num_elements if num_elements else 0
    written = digests.tensors[fqn].digest
    return lanes != [lane * copies % _MODULUS for lane in written.lanes]


def uneven_reads(reads: Iterable[tuple[str, Box]], manifest: Manifest, ranks: Ranks, action: str) -> frozenset[str]:
    """The tensors whose elements the ranks together don't all read equally often; `reads` are this rank's.

    A box is the signed sum, over its corners, of what lies beyond a corner. With a hash for each corner, the sum over
    the boxes of all ranks is R times that of the whole tensor when each element is read R times, and else hardly ever:
    with a probability of 2**-128.
    """
    fqns = sorted(manifest.tensors)
    sums = {fqn: [0, 0, 0] for fqn in fqns}
    for fqn, box in reads:
        sums[fqn] = [a + b for a, b in zip(sums[fqn], _corner_sum(box), strict=True)]
    totals = _sum_over_ranks([sums[fqn] for fqn in fqns], ranks, action)
    uneven = set()
    for fqn, total in zip(fqns, totals, strict=True):
        entry = manifest.tensors[fqn]
        times = total[2] // entry.num_elements if entry.num_elements else 0
        whole = _corner_sum(Box.whole(entry.shape))
        if entry.num_elements and [value % _MODULUS for value in total] != [times * v % _MODULUS for v in whole]:
            uneven.add(fqn)
    return frozenset(uneven)


def _corner_sum(box: Box) -> tuple[int, int, int]:
    """Two lanes of the signed sum over the corners, and the number of elements."""
    lanes = [0, 0]
    for corner in itertools.product(*(((o, 1), (o + n, -1)) for o, n in zip(box.offsets, box.sizes, strict=True))):
        text = ",".join([str(position) for position, _ in corner])
        hashed = hashlib.blake2b(text.encode(), digest_size=16).digest()
        sign = math.prod(sign for _, sign in corner)
        lanes[0] += sign * int.from_bytes(hashed[:8], "little")
        lanes[1] += sign * int.from_bytes(hashed[8:], "little")
    return lanes[0] % _MODULUS, lanes[1] % _MODULUS, box.num_elements


def _sum_over_ranks(rows: list[list[int]], ranks: Ranks, action: str) -> list[list[int]]:
    """Rows of three numbers, element by element over the ranks, the first two modulo 2**64."""
    if not ranks.is_distributed or not rows:
        return rows
    has_cpu = "cpu:" in dist.get_backend_config(ranks.group)
    signed = [[_signed(a % _MODULUS), _signed(b % _MODULUS), count] for a, b, count in rows]
    table = torch.tensor(signed, dtype=torch.int64, device="cpu" if has_cpu else "cuda")
    with ranks.lost_contact(action):
        dist.all_reduce(table, group=ranks.group)
    return [[a % _MODULUS, b % _MODULUS, count] for a, b, count in table.tolist()]


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
