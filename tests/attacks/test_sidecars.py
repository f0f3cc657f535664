"""JSON files beside the tensors, of wrong types everywhere: an error that names the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.main import run
from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.errors import CkptoolError, DamagedError
from ckptool.runs import list_checkpoints

WRONG: list[Any] = [
    None,
    5,
    -1,
    1.5,
    True,
    "text",
    [],
    [1],
    {},
    {"a": 1},
    {"a": []},
    [[["x"]]],
    float("inf"),
    1 << 80,
]


def all_wrong(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """The record with each field, and each item one level deeper, of every wrong type; and without it."""
    changed: list[tuple[str, Any]] = []
    for key, value in record.items():
        changed.append((f"no {key}", {k: v for k, v in record.items() if k != key}))
        changed += [(f"{key}={wrong}", {**record, key: wrong}) for wrong in WRONG]
        if isinstance(value, dict):
            inner = [(name, wrong) for name in value for wrong in WRONG]
            changed += [(f"{key}.{name}={wrong}", {**record, key: {**value, name: wrong}}) for name, wrong in inner]
    return changed + [(str(wrong), wrong) for wrong in WRONG]


def visit(victim: Path) -> set[int]:
    """What the commands that read a checkpoint end with."""
    name, root = "tiny", ["--root", str(victim / "ckpt")]
    commands = [["ls", *root], ["inspect", name, *root], ["verify", name, *root, "--level", "structure"]]
    return {run(command) for command in commands}


@pytest.mark.parametrize("file", ["ckptool.json", "digests.json", "data_position.json"])
def test_wrong_types_in_a_sidecar(victim: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = victim / "ckpt" / "tiny" / file
    record = json.loads(path.read_text()) if path.exists() else {"consumed": 5, "num_units": 3, "fingerprint": {"a": 1}}
    for text in [json.dumps(value) for _, value in all_wrong(record)] + ["", "{", "[" * 200_000, "\x00", "9" * 5000]:
        path.write_text(text)
        codes = visit(victim)
        said = capsys.readouterr()
        assert "internal error" not in said.err, (text[:200], said.err)
        assert codes <= {0, 4}, text[:200]


def test_wrong_types_in_a_provenance_stop_an_export_or_change_nothing(
    victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = victim / "ckpt" / "tiny" / "ckptool.json"
    record = json.loads(path.read_text())
    for what, changed in all_wrong(record):
        path.write_text(json.dumps(changed))
        code = run(["export", "tiny", "--root", str(victim / "ckpt"), "--dry-run", "--quiet"])
        assert code in (0, 1, 3, 4), what
        assert "internal error" not in capsys.readouterr().err, what


def test_a_data_position_of_wrong_types() -> None:
    source = DataSource("a", 5, {"a": "b"})
    good = DataPosition.begin([source], seq_len=4, seed=0, global_batch_size=2).advance()
    version_1 = {"num_units": 5, "seq_len": 4, "seed": 0, "global_batch_size": 2, "fingerprint": {"a": "b"}}
    version_1 |= {"consumed": 4, "order_version": 1}
    for what, changed in all_wrong(json.loads(good.to_json())) + all_wrong(version_1):
        try:
            position = DataPosition.from_json(json.dumps(changed), "x")
        except DamagedError:
            continue
        assert position.consumed >= 0 and position.unit(position.consumed).index >= 0, what
        position.cursor()


def test_pins_of_wrong_types_hold(victim: Path) -> None:
    (victim / "ckpt" / ".pins").mkdir()
    for value in WRONG:
        (victim / "ckpt" / ".pins" / "tiny.json").write_text(json.dumps({"reason": value}))
        assert [summary.pinned is not None for summary in list_checkpoints(victim / "ckpt")] == [True]


def test_a_metrics_file_of_wrong_types(victim: Path) -> None:
    from ckptool.storage.metrics_file import read_metric

    path = victim / "ckpt" / "metrics.jsonl"
    for _, line in all_wrong({"step": 1, "loss": 2.5}):
        path.write_text('{"step": 1, "loss": 0.5}\n' + json.dumps(line) + "\n")
        try:
            values = read_metric(path, "loss")
        except CkptoolError as error:
            assert "metrics.jsonl" in str(error)
        else:
            assert all(type(step) is int and type(value) is float for step, value in values.items())
