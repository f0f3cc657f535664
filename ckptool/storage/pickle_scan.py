"""Walking the opcodes of a stranger's pickle without running them, and making its dicts ours.

Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import re

from ckptool.errors import DamagedError, UnsafeError

MAX_PICKLE_BYTES = 1 << 30

# The longest integer, and the longest line of a text-mode number: beyond any real one, short enough to cost nothing.
_MAX_INTEGER_BYTES = 128

# Opcodes of fixed length, and those that take lines of text: a run of them is skipped by one match, at C speed.
# Left out on purpose: EXT1/2/4 (the process's extension registry), NEXT_BUFFER and READONLY_BUFFER (data from outside),
# BYTEARRAY8 and the set opcodes (never in such data).
_PLAIN_RUN = re.compile(
    rb"(?:"
    rb"[)012NRQ\]abelostu\x81\x85-\x89\x92\x93\x94]"  # no argument
    rb"|\((?!d)"  # MARK, but for that of DICT
    rb"|[Khq\x80]."  # BININT1, BINGET, BINPUT, PROTO
    rb"|M.."  # BININT2
    rb"|[Jj]...."  # BININT, LONG_BINGET
    rb"|G........"  # BINFLOAT
    rb"|[FILg][^\n]{0,300}+\n"  # FLOAT, INT, LONG, GET
    rb"|[PSV][^\n]*+\n"  # PERSID, STRING, UNICODE
    rb"|[ci][^\n]*+\n[^\n]*+\n"  # GLOBAL, INST
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
_INTEGERS = frozenset(b"\x8a\x8b")
_STOP, _PUT, _LONG_BINPUT, _FRAME, _EMPTY_DICT, _MARK = ord("."), ord("p"), ord("r"), ord("\x95"), ord("}"), ord("(")

#: What stands for an empty dict in a rewritten pickle: NONE, BINPERSID.
_OUR_DICT = b"NQ"
_FRAME_BYTES = 9


def with_our_dicts(raw: bytes, location: str) -> bytes:
    """Check every opcode, and return the pickle with each empty dict made by `persistent_load(None)` instead.

    A dict hashes its keys inside C code that nothing can interrupt; a dict of ours can look at them first.
    The unpickler also allocates what a length prefix or a memo index asks for before it looks whether the bytes are
    there, so both are held against the file's size. Raises DamagedError for a pickle that is cut short or asks for
    more than its size can justify, UnsafeError for opcodes that such data never needs.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise DamagedError(f"{location}: a pickle of {len(raw)} bytes is beyond any real checkpoint's")
    parts: list[bytes] = []
    position = copied = 0
    while True:
        match = _PLAIN_RUN.match(raw, position)
        position = match.end() if match else position
        opcode = raw[position] if position < len(raw) else -1
        if opcode == _EMPTY_DICT:
            parts += (raw[copied:position], _OUR_DICT)
            copied = position = position + 1
        elif opcode == _MARK:  # the plain run stops at a MARK only when DICT follows
            parts += (raw[copied:position], _OUR_DICT)
            copied = position = position + 2
        elif opcode == _FRAME and not _is_cut(raw, position):
            parts.append(raw[copied:position])
            copied = position = position + _FRAME_BYTES
        elif opcode == _STOP:
            parts.append(raw[copied : position + 1])
            return _in_one_frame(b"".join(parts))
        elif opcode < 0:
            raise DamagedError(f"{location}: the pickle ends at byte {position} without its STOP (cut short?)")
        else:
            position = _after_sized(raw, position, opcode, location)


def _is_cut(raw: bytes, position: int) -> bool:
    """True for a frame that reaches beyond the end."""
    start = position + _FRAME_BYTES
    return start + int.from_bytes(raw[position + 1 : start], "little") > len(raw)


def _in_one_frame(body: bytes) -> bytes:
    """Framed, so that the unpickler takes it in one read."""
    return bytes([_FRAME]) + len(body).to_bytes(8, "little") + body


def _after_sized(raw: bytes, position: int, opcode: int, location: str) -> int:
    """The position after the opcode at `position`, which carries a length or a memo index."""
    start = position + 1
    if opcode in _COUNT_BYTES:
        start += _COUNT_BYTES[opcode]
        num_bytes = int.from_bytes(raw[position + 1 : start], "little")
        end = start + num_bytes
        if opcode in _INTEGERS and num_bytes > _MAX_INTEGER_BYTES:
            raise DamagedError(f"{location}: damaged pickle: an integer of {num_bytes} bytes at byte {position}")
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
        raise DamagedError(f"{location}: the pickle is cut short at byte {position}, or its argument is endless")
    return end


def _check_memo_index(index: int, position: int, location: str) -> None:
    # Picklers number their memo entries upwards, at most one per opcode before.
    if not 0 <= index <= position:
        raise DamagedError(f"{location}: damaged pickle: memo index {index} at byte {position}")
