from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptool import errors
from ckptool.cli._errors import report
from ckptool.cli.main import run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (errors.NotFoundError("no x", hint="ckptool ls"), 1, "error: no x\nhint: ckptool ls\n"),
        (errors.UsageError("bad"), 2, "error: bad\n"),
        (errors.MismatchError("a is not b"), 3, "error: a is not b\n"),
        (errors.DamagedError("cut short"), 4, "error: cut short\n"),
        (errors.UnsafeError("runs os.system"), 5, "error: runs os.system\n"),
        (errors.TargetExistsError("taken"), 6, "error: taken\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
        (PermissionError(errno.EACCES, "no", "/x"), 1, "error: permission denied: /x\n"),
        (OSError(errno.ENOSPC, "full", "/x"), 1, "error: no space left on the disk of /x\n"),
        (OSError(errno.ENOSPC, "full", "/read", None, "/written"), 1, "error: no space left on the disk of /written\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (errors.DamagedError("two\nlines\x1b[0m"), 4, "error: two\\nlines\\x1b[0m\n"),
    ],
)
def test_each_error_has_its_line_and_exit_code(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(text)


def test_the_unexpected_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTOOL_DEBUG", raising=False)
    assert report(RuntimeError("odd")) == 1
    assert capsys.readouterr().err == "internal error: RuntimeError: odd; set CKPTOOL_DEBUG=1 for the traceback\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    assert run(["inspect", "/nowhere/at/all"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["import-hf"],
        ["export", "x", "--to", "onnx"],
        ["export", "x", "--max-shard-size", "5 bananas"],
        ["import-hf", "x", "--dtype", "int8"],
        ["unheard-of"],
        ["ls", "one", "--root", "two"],
    ],
)
def test_usage_errors_exit_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err != ""


@pytest.mark.parametrize(
    ("args", "kind", "code", "words"),
    [
        (["inspect", "/nowhere/at/all", "--json"], "NotFoundError", 1, "no checkpoint /nowhere/at/all"),
        (["inspect", "--json"], "MissingParameter", 2, "Missing argument 'NAME'."),
        (["ls", "one", "--root", "two", "--json"], "UsageError", 2, "the root is given twice"),
        (["verify", "x", "--json", "--level", "deep"], "BadParameter", 2, "Invalid value for '--level'"),
    ],
)
def test_with_json_an_error_is_an_object_on_stdout_and_a_line_on_stderr(
    args: list[str], kind: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == code
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert list(answer) == ["version", "error"]
    assert list(answer["error"]) == ["kind", "message", "hint", "exit_code"]
    assert (answer["error"]["kind"], answer["error"]["exit_code"]) == (kind, code)
    assert words in answer["error"]["message"]
    assert words in output.err


def test_json_after_two_dashes_is_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--", "--json"]) == 1
    assert capsys.readouterr().out == ""


def test_a_reader_that_goes_away_causes_no_complaint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptool", "completion", "zsh"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 1)
    process.stderr.close()
