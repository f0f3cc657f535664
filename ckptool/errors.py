"""Every error ckptool raises on purpose: one line for a person, an exit code, and the next thing to type.

Exit codes: 0 ok, 1 error, 2 usage, 3 mismatch, 4 damaged input, 5 unsafe content, 6 target exists, 130 interrupted.
"""

from __future__ import annotations


class CkptoolError(Exception):
    """Base of all ckptool errors. `str(error)` is one line; `hint` says what to do next ("" when there is nothing)."""

    exit_code = 1

    #: True when all ranks of a job have raised it together.
    is_shared = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(CkptoolError):
    """An option or argument has a value that can't mean anything."""

    exit_code = 2


class NotFoundError(CkptoolError):
    """A checkpoint, file or repository is not where it was looked for."""


class AccessError(CkptoolError):
    """The thing exists but may not be read: gated or private repository, file permissions."""


class UnsupportedError(CkptoolError):
    """The input is understood well enough to know that it can't be handled correctly."""


class StorageError(CkptoolError):
    """The disk or network refused: no space, read-only, I/O error."""


class LockedError(CkptoolError):
    """Another process is writing the same target; the message names it and its age."""


class DistributedError(CkptoolError):
    """A rank failed during a collective operation; the message names the rank and its cause."""


class MismatchError(CkptoolError):
    """Two things that must agree don't: names, shapes, dtypes, recorded and present versions."""

    exit_code = 3


class DamagedError(CkptoolError):
    """The input is incomplete, truncated or inconsistent with itself.

    `kind` is what `verify` reports: corrupt, missing, truncated or overlapping.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str = "", kind: str = "corrupt") -> None:
        super().__init__(message, hint)
        self.kind = kind


class UnsafeError(CkptoolError):
    """The input tries to run code or to reach outside its own folder; nothing of it was executed."""

    exit_code = 5


class TargetExistsError(CkptoolError):
    """The place to write to is taken; nothing there was touched."""

    exit_code = 6


def name_some(names: list[str] | set[str], limit: int = 5) -> str:
    """Join names for an error line: the first `limit` in sorted order, then how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
