"""Text fit to be shown: names that nobody vouches for, and numbers of bytes."""

from __future__ import annotations

_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def one_line(text: str) -> str:
    """The text with control characters escaped: a name in a hostile file must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(num_bytes: int) -> str:
    """`270.1 MB`: decimal units, one decimal."""
    value = float(num_bytes)
    for unit in _SIZE_UNITS:
        if value < 999.95 or unit == _SIZE_UNITS[-1]:
            break
        value /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
