"""Flipped bits and cut files: found by whoever reads the checkpoint whole, before a tensor is used."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError
from tests.faults.scenarios import NAME, make_old, read_checked

NUM_FLIPS, NUM_CUTS = 1400, 300
SAMPLE_EVERY = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage")
    make_old(root)
    return root / NAME


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def damages(checkpoint: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, position, bit) of a flip, or (file, length, -1) of a cut; the same every time, spread over all files."""
    drawn = random.Random(0)
    files = files_of(checkpoint)
    for number in range(NUM_FLIPS + NUM_CUTS):
        file = files[number % len(files)]
        size = file.stat().st_size
        yield file, drawn.randrange(size), drawn.randrange(8) if number < NUM_FLIPS else -1


@contextlib.contextmanager
def damaged(file: Path, position: int, bit: int) -> Iterator[None]:
    raw = file.read_bytes()
    broken = bytearray(raw)
    if bit < 0:
        del broken[position:]
    else:
        broken[position] ^= 1 << bit
    file.write_bytes(broken)
    try:
        yield
    finally:
        file.write_bytes(raw)


def check_reading(checkpoint: Path, some: list[tuple[Path, int, int]]) -> None:
    whole = read_checked(checkpoint)
    unseen = []
    for damage in some:
        with damaged(*damage):
            try:
                read_checked(checkpoint)
                unseen.append(damage)
            except CkptoolError:
                pass
    assert unseen == []
    assert read_checked(checkpoint) == whole


def check_loading(checkpoint: Path, some: list[tuple[Path, int, int]]) -> None:
    """A load ends in our own error, or with the very values that were saved."""
    expected = load(checkpoint)
    num_refused = 0
    for damage in some:
        with damaged(*damage):
            try:
                state = load(checkpoint)
            except CkptoolError:
                num_refused += 1
            else:
                assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True)), damage
    assert num_refused > len(some) // 4


def load(checkpoint: Path) -> list[torch.Tensor]:
    state = {
        "model": {"a": torch.zeros(40, 3), "b": torch.zeros(20).bfloat16()},
        "step": 0,
        "data": {"cursor": torch.zeros(8).long(), "record": ""},
    }
    ckptool.load(state, checkpoint)
    assert (state["step"], state["data"]["record"]) == (1, "{}")  # type: ignore[index]
    return [state["model"]["a"], state["model"]["b"], state["data"]["cursor"]]  # type: ignore[index]


def test_some_damages_are_found(checkpoint: Path) -> None:
    check_reading(checkpoint, list(damages(checkpoint))[::SAMPLE_EVERY])


def test_with_some_damages_nothing_wrong_is_loaded(checkpoint: Path) -> None:
    check_loading(checkpoint, list(damages(checkpoint))[:: 2 * SAMPLE_EVERY])


@pytest.mark.slow
def test_every_damage_is_found(checkpoint: Path) -> None:
    some = list(damages(checkpoint))
    assert len(some) >= 1000 and {file for file, _, _ in some} == set(files_of(checkpoint))
    check_reading(checkpoint, some)


@pytest.mark.slow
def test_with_no_damage_anything_wrong_is_loaded(checkpoint: Path) -> None:
    check_loading(checkpoint, list(damages(checkpoint)))


@pytest.mark.parametrize("name", ["digests.json", "ckptool.json", "data_position.json", "hf/tokenizer.json"])
def test_missing_files_are_found(checkpoint: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    os.remove(copy / name)
    with pytest.raises(CkptoolError):
        read_checked(copy)
