from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptool import import_hf, verify
from ckptool.core.parts import FileRecord
from ckptool.errors import DamagedError, StorageError
from ckptool.ops.head_start import beside
from tests.tiny_models import llama, mixtral, save_folder

RECORD = FileRecord("__0_0.distcp", 3, "ab")

#: The command in an interpreter that has not loaded transformers, with models of any size worth a head start.
PROGRAM = """
from ckptool.ops import head_start
head_start.MIN_BYTES = 0
def say(words, copying):
    def said(*arguments):
        print(words)
        return copying(*arguments)
    return said
head_start.beside = say("head start", head_start.beside)
head_start.at_once = say("in vain", head_start.at_once)
from ckptool.cli.main import main
main()
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [(llama, ["--dtype", "fp32"], ["head start"]), (mixtral, [], ["head start", "in vain"])],
)
def test_a_head_start_right_or_wrong_changes_nothing(
    make: object, options: list[str], words: list[str], tmp_path: Path
) -> None:
    folder = save_folder(make(), tmp_path / "model", "40KB")  # type: ignore[operator]
    import_hf(str(folder), str(tmp_path / "plain"), dtype=options[1] if options else "keep")
    ended = run("import-hf", str(folder), str(tmp_path / "early"), *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:-1] == words
    plain, early = (json.loads((tmp_path / name / "digests.json").read_text()) for name in ("plain", "early"))
    assert early["tensors"] == plain["tensors"]
    assert early["files"].keys() == plain["files"].keys()
    plain, early = (json.loads((tmp_path / name / "ckptool.json").read_text()) for name in ("plain", "early"))
    assert early["naming"] == plain["naming"] and early["ties"] == plain["ties"]
    assert verify(str(tmp_path / "early"), against=str(tmp_path / "plain")).findings == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["early", "model", "plain"]


def test_an_export_of_names_that_were_kept_needs_not_start_again(tmp_path: Path) -> None:
    folder = save_folder(llama(num_hidden_layers=11), tmp_path / "model")
    import_hf(str(folder), str(tmp_path / "imported"))
    ended = run("export", str(tmp_path / "imported"), "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:-1] == ["head start"]
    assert verify(str(tmp_path / "out"), against=str(folder)).findings == ()
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_model_that_is_refused_leaves_nothing_of_its_head_start(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    ended = run("import-hf", str(folder), str(tmp_path / "new"))
    assert (ended.returncode, ended.stdout.split("\n")[0]) == (3, "head start")
    assert "has no place for" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_records_and_progress_come_from_the_other_process() -> None:
    seen: list[int] = []

    def copy(report: object) -> list[FileRecord]:
        report(os.getpid())  # type: ignore[operator]
        return [RECORD]

    with beside(copy, lambda: seen.append) as records:
        assert records() == [RECORD]
    assert sum(seen) > 0 and sum(seen) != os.getpid()


def test_an_error_of_the_copy_is_raised_where_its_records_are_wanted() -> None:
    def copy(report: object) -> list[FileRecord]:
        raise DamagedError("a chunk is damaged", "get it anew")

    with pytest.raises(DamagedError, match="a chunk is damaged") as caught, beside(copy, lambda: None) as records:
        records()
    assert caught.value.hint == "get it anew"


def test_a_copy_that_dies_is_said_to_have() -> None:
    def copy(report: object) -> list[FileRecord]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    with pytest.raises(StorageError, match="has died"), beside(copy, lambda: None) as records:
        records()


def test_the_copy_ends_with_a_block_that_fails(tmp_path: Path) -> None:
    def copy(report: object) -> list[FileRecord]:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)
        return []

    with pytest.raises(KeyError), beside(copy, lambda: None):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise KeyError
    with pytest.raises(ProcessLookupError), contextlib.suppress(PermissionError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
