"""Tokenizing may be killed at any moment: what is done is kept, and half a cache is never read."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ckptool import DamagedError
from tests.trainer.tiny import make_tokenizer
from trainer.corpus import open_corpus
from trainer.sources import token_cache
from trainer.sources.spec import SourceSpec

NUM_DOCUMENTS = 400
TOKENIZE = """
import os, sys, time
from pathlib import Path
from trainer.corpus import open_corpus
from trainer.sources import token_cache
from trainer.sources.spec import SourceSpec

def slow(*args):
    time.sleep(0.2)
    return make(*args)

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
token_cache.MIN_PIECE_ROWS = 40
make, token_cache._make = token_cache._make, slow
folder = Path(sys.argv[1])
open_corpus(SourceSpec("files", (str(folder / "a.jsonl"),), "files"), folder / "hf", folder, print)
"""


@pytest.fixture
def folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "hf")
    rows = [json.dumps({"text": f"document {n} " * (n % 7)}) for n in range(NUM_DOCUMENTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(token_cache, "MIN_PIECE_ROWS", 40)


def open_in(folder, root, said):
    return open_corpus(SourceSpec("files", (str(folder / "a.jsonl"),), "files"), folder / "hf", root, said.append)


def test_a_killed_run_leaves_pieces_that_the_next_one_keeps(folder, small_pieces, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    process = subprocess.Popen([sys.executable, "-c", TOKENIZE, str(folder)])
    deadline = time.monotonic() + 120
    while len(done := list(folder.glob(".data-cache/.*.partial/*.lengths"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "it never came this far"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(folder.glob(".data-cache/[!.]*"))
    times = {path.name: path.stat().st_mtime_ns for path in done}

    said: list[str] = []
    corpus = open_in(folder, folder, said)
    assert any("pieces are there from an earlier run" in line for line in said)
    assert {name: (corpus.folder / name).stat().st_mtime_ns for name in times} == times
    clean = open_in(folder, folder / "clean", said)
    assert clean.fingerprint == corpus.fingerprint
    assert corpus.tokens().read(0, corpus.num_tokens).tolist() == clean.tokens().read(0, clean.num_tokens).tolist()
    assert corpus.num_documents == sum(bool(n % 7) for n in range(NUM_DOCUMENTS))


@pytest.mark.slow
def test_pieces_of_several_processes_are_those_of_one(folder, monkeypatch, small_pieces):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone = open_in(folder, folder / "alone", [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    shared = open_in(folder, folder / "shared", [])
    monkeypatch.setattr(token_cache, "MIN_PIECE_ROWS", 1024)
    whole = open_in(folder, folder / "whole", [])
    assert alone.fingerprint == shared.fingerprint == whole.fingerprint
    assert (len(shared.parts), len(whole.parts)) == (10, 1)
    assert shared.tokens().read(0, shared.num_tokens).tolist() == whole.tokens().read(0, whole.num_tokens).tolist()


def test_an_error_in_a_piece_publishes_nothing(folder, small_pieces, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": ["a"] if n == 90 else ["b"]}) for n in range(100)))
    with pytest.raises(DamagedError, match="no string but list"):
        open_in(folder, folder, [])
    assert not list(folder.glob(".data-cache/[!.]*"))


def test_a_cache_whose_record_is_broken_says_how_to_remove_it(folder):
    corpus = open_in(folder, folder, [])
    (corpus.folder / "tokens.json").write_text("{")
    with pytest.raises(DamagedError, match=r"tokens\.json") as caught:
        open_in(folder, folder, [])
    assert caught.value.hint == f"rm -r {corpus.folder}"


def test_a_second_process_waits_for_the_first(folder):
    said: list[str] = []
    with token_cache.sole_builder(folder / "cache", print):
        code = (
            "import sys\nfrom pathlib import Path\nfrom trainer.sources.token_cache import sole_builder\n"
            "with sole_builder(Path(sys.argv[1]), lambda line: print(line, flush=True)): print('in', flush=True)"
        )
        other = subprocess.Popen([sys.executable, "-c", code, str(folder / "cache")], stdout=subprocess.PIPE, text=True)
        said.append(other.stdout.readline())
    rest, _ = other.communicate(timeout=60)
    assert said == ["waiting for another process that tokenizes the same data\n"]
    assert rest == "in\n"
