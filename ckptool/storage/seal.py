"""A checksum at the end of a file that other programs read too, and that can't list itself in `digests.json`.

An unpickler stops at the pickle's end, so what follows is ours to use.
"""

from __future__ import annotations

from blake3 import blake3

from ckptool.errors import DamagedError

_MARK = b"\nblake3 "
_HEX_BYTES = 64
SEAL_BYTES = len(_MARK) + _HEX_BYTES


def seal(raw: bytes) -> bytes:
    """`raw`, followed by its BLAKE3."""
    return raw + _MARK + blake3(raw).hexdigest().encode()


def unseal(raw: bytes, location: str) -> tuple[bytes, bool]:
    """The bytes without their seal, and whether there was one. Raises DamagedError when it is of other bytes."""
    body, mark, recorded = raw[:-SEAL_BYTES], raw[-SEAL_BYTES:-_HEX_BYTES], raw[-_HEX_BYTES:]
    if mark != _MARK:
        return raw, False
    if blake3(body).hexdigest().encode() != recorded:
        raise DamagedError(
            f"{location} has changed since it was written (checksum mismatch)",
            hint="restore the file from another copy, or use another checkpoint",
        )
    return body, True
