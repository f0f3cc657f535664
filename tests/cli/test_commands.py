from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.main import run
from tests.test_architecture import heavy_modules_after


def results(args: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_import_and_export_print_what_they_wrote(
    hub_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import-hf", str(hub_folder), "base", "--root", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"imported to {tmp_path / 'base'} (")
    assert "to write; needs" in output.err
    assert run(["export", "base", "--to", "hf", "--root", str(tmp_path), "--quiet"]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (f"{tmp_path / 'base-hf'}\n", "")
    assert (tmp_path / "base-hf" / "model.safetensors").is_file()


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["export", "tiny", "--root", str(root), "--out", str(out), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "nothing was written" in output.out
    assert str(out) in output.out
    assert list(tmp_path.iterdir()) == []


def test_json_results_carry_their_version_and_the_plan(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", "tiny", "--root", str(root), "--out", str(tmp_path / "out"), "--dry-run"]
    result = results(args, capsys)
    assert (result["version"], result["verb"], result["executed"]) == (1, "export", False)
    assert result["plan"]["write_bytes"] > 0


def test_an_existing_target_is_refused_with_exit_code_6(
    hub_folder: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import-hf", str(hub_folder), "--root", str(root)]) == 6
    assert "hint: " in capsys.readouterr().err


def test_ls_lists_what_is_complete_and_why_the_rest_is_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in results(["ls", str(root)], capsys)["checkpoints"]}
    assert {name: row["complete"] for name, row in rows.items()} == {"tiny": True, "step-5": True, "step-7": False}
    assert rows["step-7"]["reason"] != ""
    assert rows["step-5"]["step"] == 5
    assert run(["ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "SIZE", "STATE", "WORLD", "DATA", "AGE"]
    assert rows["step-7"]["reason"] in lines[3]


def test_ls_of_an_empty_root_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints under {tmp_path}\n"


def test_ls_of_a_root_that_was_named_and_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["ls"]) == 0
    assert capsys.readouterr().out == "no checkpoints under ckpt\n"
    assert run(["ls", "nodir"]) == run(["ls", "--root", "nodir"]) == 1
    monkeypatch.setenv("CKPTOOL_ROOT", "nodir")
    assert run(["ls"]) == 1
    assert capsys.readouterr().err.count("error: there is no folder nodir\nhint: ") == 3


def test_the_root_comes_from_the_environment(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTOOL_ROOT", str(root))
    assert run(["ls", "--quiet"]) == 0
    assert set(capsys.readouterr().out.split()) == {"tiny", "step-5", "step-7"}


def test_inspect_tells_tensors_ties_files_and_origin(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = results(["inspect", "tiny", "--root", str(root)], capsys)
    tensors = {tensor["fqn"]: tensor for tensor in result["tensors"]}
    assert tensors["model.lm_head.weight"]["tied_to"] == "model.model.embed_tokens.weight"
    assert tensors["model.model.embed_tokens.weight"]["shape"] == [97, 48]
    assert sum(file["num_chunks"] for file in result["files"]) == result["num_chunks"]
    assert result["provenance"]["naming"]["architecture"] == "LlamaForCausalLM"
    assert set(result["dtypes"]) == {"bfloat16"}


def test_inspect_shows_foreign_checkpoints_and_filters_by_glob(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = results(["inspect", "latest", "--root", str(root), "--keys", "*.w"], capsys)
    assert [tensor["fqn"] for tensor in result["tensors"]] == ["model.w"]
    assert result["num_tensors"] == 2
    assert result["provenance"] is None
    assert run(["inspect", "step-5", "--root", str(root)]) == 0
    assert "no ckptool.json" in capsys.readouterr().out


def test_inspect_shows_twenty_rows_unless_asked_for_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "tiny", "--root", str(root)]) == 0
    short = capsys.readouterr()
    assert run(["inspect", "tiny", "--root", str(root), "--all"]) == 0
    full = capsys.readouterr()
    assert "--all lists them" in short.err
    assert full.err == ""
    assert len(full.out.splitlines()) > len(short.out.splitlines())


@pytest.mark.parametrize("args", [["ls"], ["inspect", "tiny"], ["inspect", "latest", "--json"]])
def test_looking_at_checkpoints_imports_no_heavy_library(args: list[str], root: Path) -> None:
    assert heavy_modules_after([*args, "--root", str(root)]) == ""


@pytest.mark.parametrize(
    ("incomplete", "offered"), [("st", ["step-5"]), ("", ["latest", "step-5", "tiny"]), ("./x", ["./x"])]
)
def test_the_shell_completes_checkpoint_names(incomplete: str, offered: list[str], root: Path) -> None:
    environment = {
        **os.environ,
        "CKPTOOL_ROOT": str(root),
        "_CKPTOOL_COMPLETE": "zsh_complete",
        "COMP_WORDS": f"ckptool inspect {incomplete}",
        "COMP_CWORD": "2",
    }
    command = [sys.executable, "-c", "from ckptool.cli.main import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[1::3] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_CKPTOOL_COMPLETE" in capsys.readouterr().out


PRESSES_CTRL_C = """
import contextlib, signal, sys
from ckptool.cli.main import main

class WhenTransformersIsLoaded:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            with contextlib.suppress({swallowed}):
                signal.raise_signal(signal.SIGINT)

# A shell's background jobs ignore SIGINT, and so would their children: take Python's own handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, WhenTransformersIsLoaded())
main()
"""


@pytest.mark.parametrize("swallowed", ["", "KeyboardInterrupt"])
def test_ctrl_c_ends_with_130_and_leaves_no_target_even_if_a_library_swallows_it(
    hub_folder: Path, tmp_path: Path, swallowed: str
) -> None:
    script = PRESSES_CTRL_C.format(swallowed=swallowed)
    command = [sys.executable, "-c", script, "import-hf", str(hub_folder), "base", "--root", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 130
    assert ended.stderr.endswith("interrupted\n")
    assert list(tmp_path.glob("*")) == []
