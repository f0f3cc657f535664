"""Reading pickles from strangers: a check of every opcode, then an unpickler that knows only the names it is given.

A pickle is a program. Here it may only build plain containers, numbers and strings, and call what the caller's table
lists; any other global is refused before a single call is made on its behalf. Time and memory stay proportional to its
size: dicts are of our own class, which takes only keys that hash in constant time (a tuple can be built of a kilobyte
and take longer than the universe to hash), and what the table lists must refuse large arguments.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptool.errors import CkptoolError, DamagedError, UnsafeError
from ckptool.storage.pickle_scan import FLAT_LISTS, OUR_DICTS, Dialect, rewrite_dicts

#: What a pickle may refer to: (module, name) -> the object that stands for it.
Globals = Mapping[tuple[str, str], Any]

# Below the modulus of Python's integer hash, 2**61 - 1: so equal hashes mean equal keys.
_MAX_INTEGER_KEY = 1 << 60
_MAX_DETAIL_CHARACTERS = 200
_BUFFER_BYTES = 256 << 10


class FrozenType(type):
    """The metaclass of classes put into a Globals table: a pickle's BUILD can't set attributes on them.

    Their instances may be dict keys, so they must keep the hash by identity.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} may not be changed by a pickle")


class KeyCheckedDict(dict):
    """The dicts of a pickle: their keys are strings, small integers or instances of the table's classes."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            check_key(key)
        dict.__setitem__(self, key, value)


def check_key(key: Any) -> None:
    """Raise TypeError for a dict key whose hash could take long or be made to collide."""
    small = type(key) is int and -_MAX_INTEGER_KEY < key < _MAX_INTEGER_KEY
    if not (small or type(key) in (str, bool) or type(type(key)) is FrozenType):
        raise TypeError(f"a dict key is not a string but {describe(key)}")


def describe(value: Any) -> str:
    """A few words about a value from a pickle. Its own repr could be endless."""
    if type(value) in (str, int, float, bool, bytes) or value is None:
        return repr(value)[:_MAX_DETAIL_CHARACTERS]
    if type(value) is list and all(type(item) is str for item in value):
        return ", ".join(value)[:_MAX_DETAIL_CHARACTERS]
    return f"a {'dict' if isinstance(value, KeyCheckedDict) else type(value).__name__}"


def load(
    raw: bytes,
    known: Globals,
    location: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `raw`, resolving globals only through `known`; `location` names it in errors.

    Raises UnsafeError for a global that is not in `known` or an opcode that such data never needs, DamagedError when
    the pickle is cut short, malformed, or asks for more time or memory than its own size can justify.
    """
    return _run(_Unpickler(raw, known, location, persistent_load), location)


def load_flat(raw: bytes, known: Globals, location: str) -> Any:
    """As `load`, several times faster for many dicts, each of which comes as a list: `pairs` gives its items.

    `known` must not make dicts either. Persistent ids are refused.
    """
    return _run(_Unpickler(raw, known, location, dialect=FLAT_LISTS), location)


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a dict as `load_flat` gives it; keys may be anything but tuples. Raises ValueError."""
    rest = iter(flat)
    for item in rest:
        if type(item) is tuple:  # added alone
            key, value = item
            yield key, value
        else:
            try:
                yield item, next(rest)
            except StopIteration:
                raise ValueError("a key without a value") from None


def load_inert(raw: bytes, known: Globals, location: str) -> Any:
    """As `load`, with an inert stand-in for each global that is not in `known` and for what a persistent id means.

    For states of which only plain parts are wanted, beside things of classes that nobody can list.
    """
    return _run(_InertUnpickler(raw, known, location, lambda pid: _Inert()), location)


def check_plain(raw: bytes, location: str) -> None:
    """Go through a pickle that another unpickler will load, with an inert stand-in for everything that it names.

    Says nothing about those names; raises DamagedError or UnsafeError for what `load` refuses besides them.
    """
    _run(_InertUnpickler(raw, {}, location, lambda pid: None), location)


def _run(unpickler: _Unpickler, location: str) -> Any:
    try:
        return unpickler.load()
    except CkptoolError:
        raise
    except Exception as error:  # a malformed pickle can make the unpickler raise nearly anything
        detail = str(error)[:_MAX_DETAIL_CHARACTERS]
        raise DamagedError(f"{location}: damaged pickle: {type(error).__name__}: {detail}") from error


class _Parts(io.RawIOBase):
    """The bytes of an iterator's parts, one after another, as a file that can only be read."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part = memoryview(part)
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        raw: bytes,
        known: Globals,
        location: str,
        persistent_load: Callable[[Any], Any] | None = None,
        dialect: Dialect = OUR_DICTS,
    ) -> None:
        # The C unpickler takes large pieces of a file that it can peek into, and single bytes of any other.
        parts = _Parts(rewrite_dicts(raw, location, dialect))
        super().__init__(io.BufferedReader(parts, min(_BUFFER_BYTES, len(raw) + 1)))
        self._known = known
        self._location = location
        self._persistent_load = persistent_load

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise UnsafeError(
                f"{self._location} wants to use {module[:100]}.{name[:100]}, which a checkpoint never needs; "
                "nothing was run",
                hint="do not load this checkpoint with other tools unless you trust where it came from",
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        if pid is None:  # see OUR_DICTS
            return KeyCheckedDict()
        if self._persistent_load is None:
            raise UnsafeError(f"{self._location} refers to objects outside itself")
        return self._persistent_load(pid)


class _Inert(metaclass=FrozenType):
    """Stands for any class or function: takes whatever a pickle does to it, and does nothing."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        if len(arguments) > 100:
            raise TypeError(f"a call with {len(arguments)} arguments")
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        check_key(key)

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _InertUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return self._known.get((module, name), _Inert)
