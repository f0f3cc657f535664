from __future__ import annotations

import pytest

from ckptool.cli._output import duration, one_line, size, table
from ckptool.cli._progress import PlainProgress, progress_on_stderr
from ckptool.core.plan import Plan


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (270_100_000, "270.1 MB"),
        (999_999, "1.0 MB"),
        (5 * 10**9, "5.0 GB"),
    ],
)
def test_sizes_are_shown_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (40, "40 s"), (180, "3 min"), (18000, "5 h"), (1e6, "12 d")]
)
def test_durations_are_shown_in_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_names_from_files_cannot_steer_the_terminal() -> None:
    assert one_line("weight\x1b[2J\nnext é") == "weight\\x1b[2J\\nnext é"


def test_a_table_that_is_not_on_a_terminal_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    table(["NAME", "SIZE"], [["n" * 200, "1 B"], ["[bold]", "20 kB"]], right=["SIZE"])
    assert capsys.readouterr().out.splitlines() == [
        "NAME" + " " * 196 + "   SIZE",
        "n" * 200 + "    1 B",
        "[bold]" + " " * 194 + "  20 kB",
    ]


@pytest.mark.parametrize(("no_color", "styled"), [("", True), ("1", False)])
def test_no_color_leaves_no_escape_sequence_in_a_terminal(
    no_color: str, styled: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    table(["NAME", "SIZE"], [["a", "1 B"]])
    output = capsys.readouterr().out
    assert "NAME" in output and ("\x1b[" in output) is styled


def test_plain_progress_prints_bytes_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(total_bytes=4000, interval_seconds=0.0)
    progress(1000)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("1.0 kB of 4.0 kB, ")
    assert " left, " in output.err and output.err.endswith(" of memory\n")


def test_plain_progress_is_silent_between_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(total_bytes=4000, interval_seconds=60.0)
    progress(1000)
    assert capsys.readouterr().err == ""


def test_needs_are_said_before_the_first_byte_and_nothing_is_said_when_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Plan("export", "a", "b", (), read_bytes=10, write_bytes=2000, peak_bytes=3000, disk_bytes=4000)
    with progress_on_stderr(quiet=False) as start:
        assert start is not None
        start(plan)
    assert capsys.readouterr().err == (
        "a -> b\n2.0 kB to write; needs 3.0 kB of memory for buffers and 4.0 kB of disk\n"
    )
    with progress_on_stderr(quiet=True) as start:
        assert start is None
