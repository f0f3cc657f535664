"""Text fit to be shown: names that nobody vouches for, and numbers of bytes."""

from __future__ import annotations

_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def one_line(text: str) -> str:
    """The text with control characters escaped: a name in a hostile file must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def gist(message: str, limit: int = 300) -> str:
    """Another library's message as one line, cut at `limit` characters."""
    return one_line(" ".join(message.split())[:limit])


def natural_order(name: str) -> list[tuple[int | str, ...]]:
    """A key that sorts dotted names with numbers as numbers: `layers.2.weight` before `layers.10.weight`.

    The order in which transformers takes the tensors of a model.
    """
    parts: list[tuple[int | str, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        digits = part[len(text) :]
        parts.append((0, int(part)) if part.isdigit() else (1, text, int(digits)) if digits else (1, text))
    return parts


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2,000 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(num_bytes: int) -> str:
    """`270.1 MB`: decimal units, one decimal."""
    value = float(num_bytes)
    for unit in _SIZE_UNITS:
        if value < 999.95 or unit == _SIZE_UNITS[-1]:
            break
        value /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
