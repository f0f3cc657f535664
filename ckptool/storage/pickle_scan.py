"""Walking the opcodes of a stranger's pickle without running them, and making its dicts harmless.

Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptool.errors import DamagedError, UnsafeError

MAX_PICKLE_BYTES = 1 << 30

# The longest integer, and the longest line of a text-mode number: beyond any real one, short enough to cost nothing.
_MAX_INTEGER_BYTES = 128

# Opcodes without an argument, but for those of dicts. Left out on purpose, and so refused: EXT1/2/4 (the process's
# extension registry), NEXT_BUFFER and READONLY_BUFFER (data from outside), BYTEARRAY8 and sets (never in such data).
_BARE = rb")012NRQ\]abelot\x81\x85-\x89\x92-\x94"


def _opcode(bare: bytes, byte: bytes, in_line: bytes, lengths: range) -> bytes:
    """A pattern: one opcode with its argument, and the argumentless ones of the class `bare` that follow it.

    `byte` and `in_line` match what an argument may hold; SHORT_BINUNICODE is taken for these `lengths` only.
    """
    texts = b"|".join(re.escape(bytes([length])) + byte + b"{%d}" % length for length in lengths)
    kinds = [
        *(rb"h" + byte, rb"j" + byte * 4, rb"K" + byte),  # BINGET, LONG_BINGET, BININT1
        rb"\((?!d)",  # MARK, but for that of DICT
        *(rb"M" + byte * 2, rb"J" + byte * 4),  # BININT2, BININT
        *([rb"\x8c(?:" + texts + b")"] if texts else []),  # SHORT_BINUNICODE
        *(rb"[q\x80]" + byte, rb"G" + byte * 8),  # BINPUT, PROTO, BINFLOAT
        rb"[FILg]" + in_line + rb"{0,300}+\n",  # FLOAT, INT, LONG, GET
        rb"[PSV]" + in_line + rb"*+\n",  # PERSID, STRING, UNICODE
        rb"[ci]" + in_line + rb"*+\n" + in_line + rb"*+\n",  # GLOBAL, INST
    ]
    follow = b"[" + bare + b"]"
    return b"(?:" + b"|".join([follow + b"++", *(kind + follow + b"*+" for kind in kinds)]) + b")"


# A run of opcodes is skipped by one match, at C speed. In a clean run no argument holds a byte that is EMPTY_DICT or
# SETITEMS as an opcode, so that those can be replaced in the whole run at once. (Ranges: quicker than [^}u]. Bounded,
# since a greedy group keeps its way back in memory; possessive groups match wrongly before Python 3.11.5, gh-106052.)
_CLEAN_RUN = re.compile(
    _opcode(_BARE + b"}u", rb"[\x00-tv-|~-\xff]", rb"[\x00-\t\x0b-tv-|~-\xff]", range(ord("u"))) + b"{1,1000}",
    re.DOTALL,
)
_ONE_OPCODE = re.compile(_opcode(_BARE, rb".", rb"[^\n]", range(0)), re.DOTALL)
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
_STOP, _PUT, _LONG_BINPUT, _FRAME, _MARK, _SETITEM = ord("."), ord("p"), ord("r"), ord("\x95"), ord("("), ord("s")
_FRAME_BYTES = 9

#: What is written in place of EMPTY_DICT, SETITEM and SETITEMS, so that the unpickler itself hashes no key.
Dialect = Mapping[str, bytes]
#: An empty dict is what `persistent_load(None)` gives (NONE, BINPERSID), and is asked to take each item.
OUR_DICTS: Dialect = {"}": b"NQ", "s": b"s", "u": b"u"}
#: A dict is a list of keys and values in turn (EMPTY_LIST, APPENDS); a lone item is a pair in it (TUPLE2, APPEND).
FLAT_LISTS: Dialect = {"}": b"]", "s": b"\x86a", "u": b"e"}


def rewrite_dicts(raw: bytes, location: str, dialect: Dialect) -> Iterator[bytes]:
    """Check every opcode, and give the pickle, in parts, with its dicts made as `dialect` has it, and without frames.

    A dict hashes its keys inside C code that nothing can interrupt, and a key can be built that takes forever.
    The unpickler also allocates what a length prefix or a memo index asks for before it looks whether the bytes are
    there, so both are held against the file's size. Raises DamagedError for a pickle that is cut short or asks for
    more than its size can justify, UnsafeError for opcodes that such data never needs.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise DamagedError(f"{location}: a pickle of {len(raw)} bytes is beyond any real checkpoint's")
    position = 0
    while True:
        start, position = position, _end_of_match(_CLEAN_RUN, raw, position)
        if position > start:
            yield raw[start:position].replace(b"}", dialect["}"]).replace(b"u", dialect["u"])
            continue
        opcode = raw[position] if position < len(raw) else -1
        if opcode == _SETITEM:
            yield dialect["s"]
            position += 1
        elif opcode == _MARK:  # runs stop at a MARK only when DICT follows
            yield dialect["}"]
            position += 2
        elif opcode == _FRAME and not _is_cut(raw, position):
            position += _FRAME_BYTES
        elif opcode == _STOP:
            yield raw[position : position + 1]
            return
        elif opcode < 0:
            raise DamagedError(f"{location}: the pickle ends at byte {position} without its STOP (cut short?)")
        else:
            start, position = position, _end_of_match(_ONE_OPCODE, raw, position)
            if position == start:
                position = _after_sized(raw, position, opcode, location)
            yield raw[start:position]


def _end_of_match(pattern: re.Pattern[bytes], raw: bytes, position: int) -> int:
    match = pattern.match(raw, position)
    return match.end() if match else position


def _is_cut(raw: bytes, position: int) -> bool:
    """True for a frame that reaches beyond the end."""
    start = position + _FRAME_BYTES
    return start + int.from_bytes(raw[position + 1 : start], "little") > len(raw)


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
