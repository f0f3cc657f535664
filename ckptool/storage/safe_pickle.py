"""Reading pickles from strangers: an opcode check, then an unpickler that knows only the names it is given.

A pickle is a program. Here it may only build plain containers, numbers and strings, and call what the caller's table
lists; any other global is refused before a single call is made on its behalf. Not prevented: tuples nested absurdly
deep as dict keys, whose hashing can hang or crash the process. Opcodes:
https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptool.errors import DamagedError, UnsafeError

MAX_PICKLE_BYTES = 1 << 30

#: What a pickle may refer to: (module, name) -> the object that stands for it.
Globals = Mapping[tuple[str, str], Any]


class FrozenType(type):
    """The metaclass of classes put into a Globals table: a pickle's BUILD can't set attributes on them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} may not be changed by a pickle")


def load(
    raw: bytes,
    known: Globals,
    location: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `raw`, resolving globals only through `known`; `location` names it in errors.

    Raises UnsafeError for a global that is not in `known` or an opcode that such data never needs, DamagedError when
    the pickle is cut short, malformed, or asks for more memory than its own size can justify.
    """
    check_opcodes(raw, location)
    unpickler = _Unpickler(raw, known, location, persistent_load)
    try:
        return unpickler.load()
    except UnsafeError:
        raise
    except Exception as error:  # a malformed pickle can make the unpickler raise nearly anything
        raise DamagedError(f"{location}: damaged pickle: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, known: Globals, location: str, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(raw))
        self._known = known
        self._location = location
        self._persistent_load = persistent_load

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise UnsafeError(
                f"{self._location} wants to use {module}.{name}, which a checkpoint never needs; nothing was run",
                hint="do not load this checkpoint with other tools unless you trust where it came from",
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise UnsafeError(f"{self._location} refers to objects outside itself")
        return self._persistent_load(pid)


# Opcodes of fixed length, and those that take lines of text: a run of them is skipped by one match, at C speed.
# Left out on purpose: EXT1/2/4 (the process's extension registry), NEXT_BUFFER and READONLY_BUFFER (data from outside),
# BYTEARRAY8 and the set opcodes (never in such data).
_PLAIN_RUN = re.compile(
    rb"(?:"
    rb"[()012NRQ}\]abdelostu\x81\x85-\x89\x92\x93\x94]"  # no argument
    rb"|[Khq\x80]."  # BININT1, BINGET, BINPUT, PROTO
    rb"|M.."  # BININT2
    rb"|[Jj]...."  # BININT, LONG_BINGET
    rb"|[G\x95]........"  # BINFLOAT, FRAME
    rb"|[FILPSVg][^\n]*\n"  # FLOAT, INT, LONG, PERSID, STRING, UNICODE, GET
    rb"|[ci][^\n]*\n[^\n]*\n"  # GLOBAL, INST
    rb")*+",
    re.DOTALL,
)
_WITH_ARGUMENT = frozenset(b"Khq\x80MJjG\x95FILPSVgci")

# Opcodes followed by a byte count, little-endian in so many bytes, then that many bytes.
_COUNT_BYTES = {
    ord("\x8c"): 1,  # SHORT_BINUNICODE
    ord("C"): 1,  # SHORT_BINBYTES
    ord("U"): 1,  # SHORT_BINSTRING
    ord("\x8a"): 1,  # LONG1
    ord("X"): 4,  # BINUNICODE
    ord("B"): 4,  # BINBYTES
    ord("T"): 4,  # BINSTRING
    ord("\x8b"): 4,  # LONG4
    ord("\x8d"): 8,  # BINUNICODE8
    ord("\x8e"): 8,  # BINBYTES8
}
_STOP, _PUT, _LONG_BINPUT = ord("."), ord("p"), ord("r")


def check_opcodes(raw: bytes, location: str) -> None:
    """Walk the opcodes without running them.

    The unpickler allocates what a length prefix or a memo index asks for before it looks whether the bytes are there,
    so both are held against the file's size here. Raises DamagedError or UnsafeError as `load` does.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise DamagedError(f"{location}: a pickle of {len(raw)} bytes is beyond any real checkpoint's")
    position = 0
    while True:
        match = _PLAIN_RUN.match(raw, position)
        position = match.end() if match else position
        if position >= len(raw):
            raise DamagedError(f"{location}: the pickle ends at byte {position} without its STOP (cut short?)")
        opcode = raw[position]
        if opcode == _STOP:
            return
        position = _after_sized(raw, position, opcode, location)


def _after_sized(raw: bytes, position: int, opcode: int, location: str) -> int:
    """The position after the opcode at `position`, which carries a length or a memo index."""
    start = position + 1
    if opcode in _COUNT_BYTES:
        start += _COUNT_BYTES[opcode]
        end = start + int.from_bytes(raw[position + 1 : start], "little")
    elif opcode == _LONG_BINPUT:
        end = start + 4
        _check_memo_index(int.from_bytes(raw[start:end], "little"), position, location)
    elif opcode == _PUT:
        end = raw.find(b"\n", start) + 1 or len(raw) + 1
        digits = raw[start : end - 1]
        _check_memo_index(int(digits) if digits.isdigit() and len(digits) < 20 else -1, position, location)
    elif opcode in _WITH_ARGUMENT:
        end = len(raw) + 1
    else:
        raise UnsafeError(f"{location}: pickle opcode {opcode:#04x} at byte {position} has no place in a checkpoint")
    if end > len(raw):
        raise DamagedError(f"{location}: the pickle is cut short at byte {position}")
    return end


def _check_memo_index(index: int, position: int, location: str) -> None:
    # Picklers number their memo entries upwards, at most one per opcode before.
    if not 0 <= index <= position:
        raise DamagedError(f"{location}: damaged pickle: memo index {index} at byte {position}")
