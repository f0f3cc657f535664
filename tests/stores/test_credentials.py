"""No output and no file has the credentials of a URL: screens, JSON, sidecars, errors, the files of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from ckptool.cli.main import run
from tests.trainer import tiny
from trainer.train import train

SECRET = "hunter2"
BUCKET = f"memory://me:{SECRET}@bucket"
RUNS = f"{BUCKET}/runs"
Memory = fsspec.AbstractFileSystem

COMMANDS = [
    ["import-hf", f"{BUCKET}/tiny", "m", "--root", RUNS],
    ["import-hf", f"{BUCKET}/tiny", "m", "--root", RUNS],  # is there already
    ["import-hf", f"{BUCKET}/absent", "n", "--root", RUNS],
    ["copy", f"{RUNS}/m", f"{RUNS}/step-1"],
    ["export", f"{RUNS}/m", "--out", f"{BUCKET}/out"],
    ["export", f"{RUNS}/absent", "--out", f"{BUCKET}/out"],
    ["reshard", f"{RUNS}/m", "r", "--world-size", "2", "--root", RUNS],
    ["ls", "--root", RUNS],
    ["inspect", f"{RUNS}/m"],
    ["verify", f"{RUNS}/m", "--level", "content", "--against", f"{BUCKET}/tiny"],
    ["verify", f"{RUNS}/damaged"],
    ["diff", f"{RUNS}/m", f"{BUCKET}/out"],
    ["plan", f"{RUNS}/m", "--world-size", "2"],
    ["estimate", f"{BUCKET}/tiny"],
    ["pin", "step-1", "--root", RUNS],
    ["prune", RUNS, "--keep-last", "1", "--dry-run"],
    ["report", f"{RUNS}/m", "--against", f"{BUCKET}/tiny", "--out", "page.html"],
    ["report", f"{RUNS}/damaged", "--overwrite", "--out", "damaged.html"],
    ["top", RUNS],
    ["top", RUNS, "--work-dir", f"{BUCKET}/out"],
    ["prune", RUNS, "--keep-best", "loss", "1", "--dry-run", "--work-dir", f"{BUCKET}/out"],
    ["data", "show", f"{RUNS}/m"],
    ["data", "seek", f"{RUNS}/m", "--to", "+1"],
    ["data", "verify", f"{RUNS}/m"],
]


@pytest.fixture
def secret_memory(hub_folder: Path) -> Memory:
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{hub_folder}/", f"/me:{SECRET}@bucket/tiny/", recursive=True)
    filesystem.pipe(f"/me:{SECRET}@bucket/runs/damaged/.metadata", b"x")
    yield filesystem
    filesystem.rm("/", recursive=True)


def test_no_command_shows_or_writes_them(
    secret_memory: Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = set()
    for command in COMMANDS:
        for options in ([], ["--json"]):
            codes.add(run([*command, *options]))
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    assert "***" in said.out and "***" in said.err and len(codes) > 2
    for path in secret_memory.find("/"):
        assert SECRET.encode() not in secret_memory.cat(path), path
    assert (tmp_path / "page.html").exists()
    for page in tmp_path.iterdir():
        assert SECRET.encode() not in page.read_bytes(), page


def test_a_run_writes_none(
    memory: Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_base(tmp_path / "base")
    tiny.make_data(tmp_path / "text")
    config = replace(tiny.tiny_config(tmp_path, init_from=str(tmp_path / "base"), steps=1), root=f"{BUCKET}/run")
    train(config)
    train(replace(config, steps=2))
    said = capfd.readouterr()
    assert "resuming from memory://***@bucket/run/step-1" in said.err
    assert SECRET not in said.out + said.err
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
    for path in memory.find("/"):
        assert SECRET.encode() not in memory.cat(path), path
