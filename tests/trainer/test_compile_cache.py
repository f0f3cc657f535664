"""What was compiled is kept for the next start, and a file that is of no use is no harm."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from ckptool import UsageError
from tests.spawn import run_ranks
from tests.trainer.tiny import DEVICE, at_most, read_lines, run, tiny_config
from trainer import compile_cache, parallel
from trainer.compile_cache import CompileCache
from trainer.metrics import Log

IDENTITY = {"format": 1, "torch": "2.13.0", "device": "a GPU"}
CONTENT = bytes(range(256)) * 8

needs_compiler = pytest.mark.skipif(
    DEVICE == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))),
    reason="torch.compile needs a C++ compiler on a CPU",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "cache.bin"
    compile_cache.write(path, IDENTITY, CONTENT)
    return path


def test_what_was_written_is_read_and_nothing_is_left_beside_it(file):
    compile_cache.write(file, IDENTITY, CONTENT[1:])
    assert compile_cache.read(file, IDENTITY) == CONTENT[1:]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("change", [{"format": 2}, {"torch": "2.14.0"}, {"device": "another GPU"}])
def test_a_file_of_another_version_or_device_is_not_read(file, change):
    [name] = change
    with pytest.raises(ValueError, match=f"its {name} is {IDENTITY[name]!r}, and {change[name]!r} here"):
        compile_cache.read(file, IDENTITY | change)


@pytest.mark.parametrize("at", [0, 1, 20, 300, -1])
def test_a_changed_byte_is_noticed(file, at):
    stored = bytearray(file.read_bytes())
    stored[at] ^= 1
    file.write_bytes(stored)
    with pytest.raises(ValueError):
        compile_cache.read(file, IDENTITY)


@pytest.mark.parametrize("num_bytes", [0, 10, 200, 2000])
def test_a_file_that_was_cut_off_is_noticed(file, num_bytes):
    os.truncate(file, num_bytes)
    with pytest.raises(ValueError):
        compile_cache.read(file, IDENTITY)


def test_a_file_that_others_can_write_is_not_read(file):
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o620)
    with pytest.raises(ValueError, match="others than this user"):
        compile_cache.read(file, IDENTITY)


def opened(root: Path, content: bytes | None = None) -> tuple[CompileCache, list[str]]:
    """The cache of a run under `root`, whose file is first filled with `content`; and what was said of it."""
    said: list[str] = []

    class Listening(Log):
        def say(self, line: str) -> None:
            said.append(line)

    with parallel.joined_ranks(DEVICE) as ranks:
        if content is not None:
            compile_cache.write(file_of(root), compile_cache.identity_of(ranks.device), content)
        cache = CompileCache.open(tiny_config(root, compile=True, compile_cache=True), ranks, Listening(root, 0))
    assert cache is not None
    return cache, said


def file_of(root: Path) -> Path:
    """Where the first rank's file is, or will be."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    return compile_cache.path_of(root, device)


def test_content_that_torch_does_not_understand_is_ignored_with_a_note(tmp_path):
    _, said = opened(tmp_path, CONTENT)
    [note] = said
    assert note.startswith("note: ") and str(file_of(tmp_path)) in note and "is ignored" in note


def test_no_file_needs_no_note(tmp_path):
    _, said = opened(tmp_path)
    assert said == []


def test_nothing_is_read_where_nobody_asked_for_it(tmp_path):
    """A root may have been made by somebody else."""
    opened(tmp_path, CONTENT)
    with parallel.joined_ranks(DEVICE) as ranks:
        assert CompileCache.open(tiny_config(tmp_path, compile=True), ranks, Log(tmp_path, 0)) is None


def test_the_option_is_refused_without_compile(tmp_path):
    with pytest.raises(UsageError, match="--compile-cache says nothing without --compile"):
        tiny_config(tmp_path, compile_cache=True).check(1)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_a_regular_file_is_opened(tmp_path, make):
    make(tmp_path / "cache.bin")
    with pytest.raises((ValueError, OSError)):
        compile_cache.read(tmp_path / "cache.bin", IDENTITY)


def compile_something(rank: int, root: Path, own: Path) -> tuple[dict[str, int], list[float]]:
    """Compile a function in a process whose cache of torch's own is empty; what was compiled, and its result."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / str(rank))
    with parallel.joined_ranks(DEVICE) as ranks:
        cache = CompileCache.open(tiny_config(root, compile=True, compile_cache=True), ranks, Log(root, rank))
        assert cache is not None
        result = torch.compile(lambda x: (x * 2).sin().sum())(torch.arange(5.0, device=ranks.device))
        cache.keep()
        return compile_cache.count_graphs(), [result.item()]


@needs_compiler
@pytest.mark.slow
def test_a_second_start_on_a_fresh_machine_compiles_nothing(tmp_path):
    ranks = at_most(2)
    first = run_ranks(ranks, compile_something, tmp_path, tmp_path / "first", limit_seconds=400)
    kept = {path.name: path.read_bytes() for path in (tmp_path / compile_cache.FOLDER).iterdir()}
    second = run_ranks(ranks, compile_something, tmp_path, tmp_path / "second", limit_seconds=400)
    assert [graphs for graphs, _ in first] == [{"compiled": 1, "cached": 0}] * ranks
    assert [graphs for graphs, _ in second] == [{"compiled": 0, "cached": 1}] * ranks
    assert [result for _, result in first] == [result for _, result in second]
    assert len(kept) == (ranks if DEVICE == "cuda" else 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / compile_cache.FOLDER).iterdir()} == kept


def train_compiled(rank: int, root: Path, own: Path) -> list[float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    return [line["loss"] for line in run(root, steps=2, compile=True, compile_cache=True, resume="never")]


@needs_compiler
@pytest.mark.slow
def test_a_run_from_the_cache_has_the_same_losses(root, tmp_path):
    """And a damaged file costs the time of compiling, and nothing else."""
    losses = []
    for life in ("compiled", "cached", "damaged"):
        if life == "damaged":
            file_of(root).write_bytes(b"damaged")
        [found] = run_ranks(1, train_compiled, root, tmp_path / life, limit_seconds=400)
        losses.append(found[-2:])
        shutil.rmtree(root / "step-2")
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)  # a GPU may find other kernels to be the fastest
    compiled, cached, damaged = (line["graphs"] for line in read_lines(root / "startup.jsonl"))
    assert compiled == damaged and compiled["cached"] == 0
    assert cached == {"compiled": 0, "cached": compiled["compiled"]}
