"""Commands about Hub repositories, as typed; and one as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from ckptool.cli.main import run
from tests.hub.conftest import REPO, environment
from tests.hub.server import SIGNATURE, TOKEN, Hub


def test_an_estimate_fetches_the_config_alone(hub: Hub, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("org/gated", folder, gated=True)
    for src, code, words in (
        (REPO, 0, "2 blocks"),
        ("org/gated", 1, "is gated"),
        ("org/no-such", 1, "neither a local"),
    ):
        assert run(["estimate", src]) == code
        captured = capfd.readouterr()
        assert words in captured.out + captured.err
    fetched = {path.rpartition("/")[2] for method, path in hub.requests if "/resolve/" in path}
    assert fetched == {"config.json"}


def test_a_command_of_its_own_reads_the_hub(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptool", "import-hf", REPO, "--json"]
    ours = {**os.environ, **environment(hub, tmp_path)}
    done = subprocess.run(command, env=ours, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == str(tmp_path / "ckpt" / "tiny-llama")
    assert hub.count("GET", "/cdn/") > 0


def test_the_reference_engine_takes_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert run(["import-hf", REPO, str(tmp_path / "m"), "--engine", "transformers", "--quiet"]) == 0
    assert list((tmp_path / "hf").rglob("snapshots/*/model-00001-of-00003.safetensors"))


def test_a_dry_run_reads_no_weights(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["import-hf", REPO, str(tmp_path / "m"), "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["target"] == str(tmp_path / "m") and not (tmp_path / "m").exists()


def test_nothing_of_the_hub_s_is_consumed(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--local-cache"]):
        assert run(["import-hf", REPO, str(tmp_path / "m"), "--consume", *more]) == 2
        assert capfd.readouterr().err.startswith("error: ")


def test_the_token_is_in_nothing_that_is_written_or_said(
    hub: Hub, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    hub.add("org/private", folder, private=True)
    assert run(["import-hf", "org/private", str(tmp_path / "m"), "--json"]) == 0
    assert run(["verify", str(tmp_path / "m"), "--against", "hf://org/private", "--json"]) == 0
    for fault, where in (("401", "/tree/"), ("404", "/tree/"), ("403", "/resolve/"), ("503", "/cdn/")):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"hub-{fault}"))  # what one leaves, none finds
        hub.fault = lambda method, path, fault=fault, where=where: fault if where in path else ""  # type: ignore[misc]
        assert run(["import-hf", "org/private", str(tmp_path / "n"), "--json"]) == 1
        if fault != "503":  # the library waits long then
            run(["import-hf", "org/private", str(tmp_path / f"cached-{fault}"), "--local-cache"])
        assert run(["inspect", "hf://org/private/assets"]) == 1
    captured = capfd.readouterr()
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    for secret in (TOKEN, SIGNATURE):
        assert secret not in captured.out + captured.err
        assert secret not in written
