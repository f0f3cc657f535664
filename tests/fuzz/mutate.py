"""Hypothesis strategies that break real files: flipped bits, cuts, splices, repeats, interesting numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

#: Lengths, offsets and opcodes that parsers trip over.
INTERESTING = [
    *(bytes([byte]) * count for byte in (0, 0x28, 0x29, 0x7F, 0x80, 0xFF) for count in (1, 2, 4, 8)),
    *((1 << power).to_bytes(8, "little") for power in (16, 31, 32, 40, 62, 63)),
    *(
        b"\x85",
        b"\x86",
        b"t",
        b"}",
        b"]",
        b"s",
        b"u",
        b"b",
        b"R",
        b"\x81",
        b"\x93",
        b"Q",
        b"2",
        b".",
        b"h\x00",
        b"\x94",
    ),
    *(b"[", b"{", b'"', b":", b",", b"null", b"1e999", b"-1", b"NaN", b'"a":', b"9" * 30, b"\\ud800", b"\xff"),
    *(b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"),
]


def _change(raw: bytes, change: tuple[int, int, int, bytes]) -> bytes:
    """One edit at a place given as a fraction of the length, so that it means something for any length."""
    kind, where, extent, new = change
    at = where * len(raw) // 10_000
    end = min(len(raw), at + extent)
    edits: Sequence[Callable[[], bytes]] = (
        lambda: raw[:at] + bytes([raw[at] ^ (1 << extent % 8)]) + raw[at + 1 :] if at < len(raw) else raw,
        lambda: raw[:at] + new + raw[at + len(new) :],
        lambda: raw[:at] + new + raw[at:],
        lambda: raw[:at] + raw[end:],
        lambda: raw[:end] + raw[at:],
        lambda: raw[:at],
    )
    return edits[kind]()


_CHANGES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 9_999),
        st.integers(1, 64),
        st.one_of(st.sampled_from(INTERESTING), st.binary(min_size=1, max_size=12)),
    ),
    min_size=1,
    max_size=6,
)


def broken(*originals: bytes) -> st.SearchStrategy[bytes]:
    """One of the originals, broken in up to six places; now and then bytes that were never anything."""

    def apply(raw: bytes, changes: list[tuple[int, int, int, bytes]]) -> bytes:
        for change in changes:
            raw = _change(raw, change)
        return raw

    mutated = st.builds(apply, st.sampled_from(originals), _CHANGES)
    return st.one_of(mutated, mutated, mutated, st.binary(max_size=200))
