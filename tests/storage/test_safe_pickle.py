"""The allow-list unpickler: plain data passes, everything that could run or blow up does not."""

from __future__ import annotations

import collections
import os
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import DamagedError, UnsafeError
from ckptool.storage.safe_pickle import FrozenType, Globals, check_plain, load, load_flat, pairs

KNOWN: Globals = {("collections", "OrderedDict"): dict}


class Frozen(metaclass=FrozenType):
    pass


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(PLAIN, st.integers(0, 5))
def test_plain_data_comes_back_in_every_protocol(value: Any, protocol: int) -> None:
    # Protocols below 3 spell bytes with a codec call, which is a global like any other.
    raw = pickle.dumps(value, protocol)
    if protocol < 3 and (b"_codecs" in raw or b"__builtin__\nbytes" in raw):
        with pytest.raises(UnsafeError):
            load(raw, KNOWN, "x")
    else:
        assert load(raw, KNOWN, "x") == value


@given(PLAIN, st.sampled_from([4, 5]))
def test_dicts_as_flat_lists_hold_the_same(value: Any, protocol: int) -> None:
    assert unflattened(load_flat(pickle.dumps(value, protocol), {}, "x"), value) == value


def unflattened(loaded: Any, like: Any) -> Any:
    """What `load_flat` gave, with dicts where `like` has them."""
    if type(like) is dict:
        return {key: unflattened(value, like[key]) for key, value in pairs(loaded)}
    if type(like) in (list, tuple):
        return type(like)(unflattened(*both) for both in zip(loaded, like, strict=True))
    return loaded


def test_a_dict_of_many_items_as_a_flat_list() -> None:
    for num_items in (1000, 1001, 2500):  # the pickler writes a thousand at a time, and a lone rest otherwise
        value = {f"{{ud}}{i}": i for i in range(num_items)}
        for protocol in range(6):
            assert dict(pairs(load_flat(pickle.dumps(value, protocol), {}, "x"))) == value


@pytest.mark.parametrize("flat", [["a"], ["a", 1, "b"], [("a",)], [("a", 1, 2)]])
def test_a_flat_list_that_is_no_dict(flat: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(pairs(flat))


@given(PLAIN, st.integers(0, 5), st.data())
def test_a_pickle_cut_anywhere_is_damaged(value: Any, protocol: int, data: st.DataObject) -> None:
    raw = pickle.dumps([value, "tail"], protocol)
    cut = data.draw(st.integers(0, len(raw) - 1))
    for reader in (load, load_flat):
        with pytest.raises((DamagedError, UnsafeError)):
            reader(raw[:cut], KNOWN, "x")


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_plain(raw: bytes) -> None:
    try:
        value = load(raw, KNOWN, "x")
    except (DamagedError, UnsafeError) as error:
        assert str(error).startswith("x")
    else:
        assert isinstance(value, bool | int | float | str | bytes | list | dict | tuple | type | None)


def test_listed_globals_are_used() -> None:
    assert load(pickle.dumps(collections.OrderedDict(a=1)), KNOWN, "x") == {"a": 1}


@pytest.mark.parametrize("protocol", range(6))
def test_any_other_global_is_named_and_not_called(protocol: int, tmp_path: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    with pytest.raises(UnsafeError, match=r"file wants to use \w+\.system"):
        load(pickle.dumps({"a": Evil()}, protocol), KNOWN, "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02ccollections\nOrderedDict.__init__.__globals__\n.",  # a dotted walk from a listed name
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pid\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x04\x8f(K\x01\x90.",  # a set
    ],
)
def test_unsafe_opcodes(raw: bytes) -> None:
    for reader in (load, load_flat):
        with pytest.raises(UnsafeError):
            reader(raw, KNOWN, "x")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b"N",
        b"\x80\x09N.",  # protocol 9
        b"r" + struct.pack("<I", 2**31) + b"N.",  # a memo of 2**31 places
        b"Np99999999999\n.",
        b"Np-1\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",  # a terabyte of bytes
        b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b".",
        b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"abc.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",  # LONG4 of negative length
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",  # FRAME
        b"(" * 100,
        b"((t" * 3 + b"0" * 9 + b".",
        b"]a.",
    ],
)
def test_malformed_pickles_are_damaged(raw: bytes) -> None:
    for reader in (load, load_flat):
        with pytest.raises(DamagedError):
            reader(raw, KNOWN, "x")


def test_deep_nesting_is_no_crash() -> None:
    value = load(b"]" + b"]" * 200_000 + b"a" * 200_000 + b".", KNOWN, "x")
    assert len(value) == 1


def test_classes_can_not_be_changed_by_build() -> None:
    known: Globals = {("m", "Frozen"): Frozen}
    # BUILD with a (dict state, slot state) pair sets attributes on whatever lies below it: here the class itself.
    raw = b"\x80\x02cm\nFrozen\n(N}X\x04\x00\x00\x00evilK\x01stb."
    with pytest.raises(DamagedError, match="may not be changed"):
        load(raw, known, "x")
    with pytest.raises(DamagedError, match="not a dictionary"):
        load_flat(raw, known, "x")
    with pytest.raises(DamagedError, match="TypeError"):
        check_plain(raw, "x")
    assert not hasattr(Frozen, "evil")
