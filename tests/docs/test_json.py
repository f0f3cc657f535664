"""The JSON page against what the commands print."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli._output import JSON_VERSION
from ckptool.cli.main import cli, run
from tests.docs.pages import TOP
from tests.hub.conftest import folder, hub  # noqa: F401  (fixtures)
from tests.hub.server import TOKEN
from tests.ops.test_data import A, B, begin, save, train
from tests.tiny_models import llama, save_folder

PAGE = TOP / "docs" / "reference" / "json.md"
SCALARS = {"str": (str,), "int": (int,), "number": (int, float), "bool": (bool,), "object": (dict,)}

Table = dict[str, str]


def tables() -> dict[str, Table]:
    """Per heading of the page, the fields that are listed below it with their types."""
    sections: dict[str, Table] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        sections[title] = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", body, re.MULTILINE))
    return sections


TABLES = tables()


def faults(value: Any, path: str, kind: str, table: Table) -> Iterator[str]:
    """Where a value differs from its documented type, or has other fields."""
    if kind.endswith("?"):
        kind = kind.removesuffix("?")
        if value is None:
            return
    container, _, inner = kind.partition(" of ")
    if kind == "any":
        return
    if inner:
        if type(value) is not {"list": list, "map": dict}[container]:
            yield f"{path} is no {container}"
            return
        suffix = "[]" if container == "list" else ".*"
        for element in value if container == "list" else value.values():
            yield from faults(element, path + suffix, inner, table)
    elif type(value) not in SCALARS[kind]:
        yield f"{path} is {value!r}, no {kind}"
    elif kind == "object":
        yield from field_faults(value, f"{path}.", table)


def field_faults(value: dict[str, Any], prefix: str, table: Table) -> Iterator[str]:
    listed = {p.removeprefix(prefix) for p in table if p.startswith(prefix)}
    fields = {name for name in listed if not re.search(r"[.\[]", name)}
    yield from (f"{prefix}{name} is not documented" for name in value.keys() - fields)
    yield from (f"{prefix}{name} is missing" for name in fields - value.keys())
    for name in value.keys() & fields:
        yield from faults(value[name], prefix + name, table[prefix + name], table)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf`, its import `tiny`, steps 3 and 8 of a run, its metrics, a `mixture`, and a loader's state."""
    root = tmp_path_factory.mktemp("json")
    save_folder(llama(), root / "hf")
    assert run(["import-hf", str(root / "hf"), "tiny", "--root", str(root), "-q"]) == 0
    three = train(begin(A), 3)
    save(root / "step-3", three)
    save(root / "step-8", train(three, 5))
    save(root / "mixture", train(begin(A, B, weights={"a": 1, "b": 3}), 2))
    streaming = {"epoch": 0, "sample_in_epoch": 6}
    (root / "streaming.json").write_text(json.dumps(streaming))
    record = {"step": 8, "loss": 1.5, "attempt": "a", "world_size": 2, "step_seconds": 0.5, "data_seconds": 0.1}
    record |= {"mfu": 0.5, "rank_data_seconds": [0.1, 0.2], "rank_probe_seconds": [0.001, 0.002]}
    (root / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return root


COMMANDS = {
    "import-hf": ["{root}/hf", "new", "--dry-run"],
    "export": ["tiny", "--to", "hf", "--dry-run", "--push", "me/mine"],
    "push": ["{root}/hf", "me/mine", "--dry-run"],
    "copy": ["tiny", "new", "--dry-run"],
    "reshard": ["tiny", "new", "--world-size", "2", "--dry-run"],
    "plan": ["tiny", "--world-size", "2"],
    "ls": ["{root}"],
    "inspect": ["step-3"],
    "verify": ["step-3", "--against", "step-8"],
    "diff": ["step-3", "tiny"],
    "prune": ["{root}", "--keep-last", "1", "--dry-run"],
    "pin": ["tiny", "--reason", "base"],
    "estimate": ["{root}/hf", "--gpus", "2", "--gpu-memory", "80GB"],
    "report": ["{root}", "--out", "{root}/report.html", "--overwrite"],
    "top": ["{root}"],
    "data show": ["step-3"],
    "data plan": ["step-3", "--world-size", "2"],
    "data diff": ["step-3", "step-8"],
    "data verify": ["step-8", "--replay"],
    "data seek": ["step-8", "--to", "+5", "--dry-run"],
    "data skip": ["step-8", "unit:60..70", "--dry-run"],
    "data edit": ["mixture", "--weights", "a=.5,b=.5", "--dry-run"],
    "data import": ["step-8", "--from", "streaming", "--state", "{root}/streaming.json", "--dry-run"],
}
WITHOUT_ROOT = {"ls", "prune", "top", "estimate", "push"}


@pytest.fixture(autouse=True)
def account(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is its stand-in, where we are somebody."""
    request.getfixturevalue("hub")
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_the_page_says(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*name.split(), *(arg.format(root=root) for arg in COMMANDS[name]), "--json"]
    run([*args, *([] if name in WITHOUT_ROOT else ["--root", str(root)])])
    printed = json.loads(capsys.readouterr().out)
    assert "error" not in printed, printed
    assert printed["version"] == JSON_VERSION == 1
    assert list(field_faults(printed, "", TABLES["Every result"] | TABLES[f"ckptool {name}"])) == []


def test_a_failed_command_prints_what_the_page_says(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "nothing", "--root", str(root), "--json"]) == 1
    assert list(field_faults(json.loads(capsys.readouterr().out), "", TABLES["Errors"])) == []


def test_findings_are_as_the_page_says(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(root / "step-3", tmp_path / "step-3"))
    (copy / "__0_0.distcp").unlink()
    assert run(["verify", str(copy), "--json"]) == 4
    printed = json.loads(capsys.readouterr().out)
    assert printed["findings"]
    assert list(field_faults(printed, "", TABLES["Every result"] | TABLES["ckptool verify"])) == []


def test_every_command_with_json_is_on_the_page_and_tried_here() -> None:
    commands = {name: command for name, command in cli.commands.items() if name != "data"}
    commands |= {f"data {name}": command for name, command in cli.commands["data"].commands.items()}  # type: ignore[attr-defined]
    with_json = {name for name, c in commands.items() if any("--json" in param.opts for param in c.params)}
    documented = {title.removeprefix("ckptool ") for title in TABLES if title.startswith("ckptool ")}
    assert with_json == documented == set(COMMANDS)


def test_the_check_finds_other_types_and_fields() -> None:
    table = {"a": "list of object", "a[].b": "int?", "c": "map of str"}
    assert list(field_faults({"a": [{"b": None}, {"b": 1}], "c": {"x": "y"}}, "", table)) == []
    assert sorted(field_faults({"a": [{"b": "1", "d": 2}], "c": {"x": 3}}, "", table)) == [
        "a[].b is '1', no int",
        "a[].d is not documented",
        "c.* is 3, no str",
    ]
    assert list(field_faults({"a": []}, "", table)) == ["c is missing"]
