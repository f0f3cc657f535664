"""Names that lead out of a folder: refused with exit code 5, whatever file they stand in and however they get out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.cli.main import run
from ckptool.errors import UnsafeError
from ckptool.formats.hf_folder import INDEX_NAME, HfSource
from ckptool.storage.files import RangeReader, read_json, safe_join

ESCAPES = ["../secret/key", "/etc/passwd", "a/../../secret/key", "..", "a\\..\\b", "nul\0byte", "", "/", "//"]


@pytest.mark.parametrize("name", [*ESCAPES, "x" * 300, "x/" * 3000, "lone \ud800 surrogate"])
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeError) as caught:
        safe_join(tmp_path, name)
    assert caught.value.exit_code == 5
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ESCAPES)
def test_an_index_that_names_files_elsewhere(victim: Path, name: str) -> None:
    index = json.loads((victim / "hub" / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (victim / "hub" / INDEX_NAME).write_text(json.dumps(index))
    assert run(["import-hf", str(victim / "hub"), "stolen", "--root", str(victim / "ckpt")]) == 5
    assert not (victim / "ckpt" / "stolen").exists()


@pytest.mark.parametrize(
    "weight_map", [5, [], None, {"a": 5}, {"a": None}, {"a": ["x"]}, "model.safetensors", {"a": {"b": "c"}}]
)
def test_an_index_of_wrong_types(victim: Path, weight_map: object) -> None:
    (victim / "hub" / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert run(["import-hf", str(victim / "hub"), "x", "--root", str(victim / "ckpt")]) == 4


def test_a_shard_that_is_a_link_out(victim: Path) -> None:
    shard = min((victim / "hub").glob("*.safetensors"))
    shard.rename(victim / "moved")
    shard.symlink_to(victim / "moved")
    assert run(["import-hf", str(victim / "hub"), "x", "--root", str(victim / "ckpt")]) == 5


def test_a_folder_on_the_way_that_is_a_link_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").write_bytes(b"x")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeError, match="link out of its folder"):
        RangeReader(tmp_path / "inside").read("sub/data", 0, 1)


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UnsafeError):
        safe_join(tmp_path, "a")


@pytest.mark.parametrize("command", [["export", "tiny", "--to", "hf"], ["import-hf", "HUB", "again"]])
def test_a_side_file_that_is_a_link_to_a_secret_is_not_copied(victim: Path, command: list[str]) -> None:
    for folder in (victim / "hub", victim / "ckpt" / "tiny" / "hf"):
        (folder / "notes.txt").symlink_to(victim.parent / "secret" / "key")
    arguments = [str(victim / "hub") if word == "HUB" else word for word in command]
    assert run([*arguments, "--root", str(victim / "ckpt")]) == 5


def test_a_training_run_does_not_copy_a_secret_either(victim: Path) -> None:
    import torch

    import ckptool

    (victim / "ckpt" / "tiny" / "hf" / "notes.txt").symlink_to(victim.parent / "secret" / "key")
    with pytest.raises(ckptool.CkptoolError, match="link out of its folder"):
        ckptool.save(
            {"model": {"a": torch.ones(2)}},
            victim / "ckpt" / "step-1",
            provenance=ckptool.Provenance("0"),
            side_folder=victim / "ckpt" / "tiny" / "hf",
        )


def test_a_linked_folder_of_side_files_is_left_alone(victim: Path) -> None:
    (victim / "hub" / "more").symlink_to(victim.parent / "secret")
    assert run(["import-hf", str(victim / "hub"), "again", "--root", str(victim / "ckpt"), "--quiet"]) == 0
    assert not (victim / "ckpt" / "again" / "hf" / "more").exists()


@pytest.mark.parametrize("name", ["ckptool.json", "digests.json", "data_position.json", ".metadata", "__0_0.distcp"])
def test_a_pipe_or_a_device_in_place_of_a_file_does_not_block(victim: Path, name: str) -> None:
    folder = victim / "ckpt" / "tiny"
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "internal error" not in done.stderr
    assert done.returncode in (0, 1, 4, 5)  # 1: without .metadata it is no checkpoint
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert run(["ls", str(victim / "ckpt")]) == 0
    if name.endswith(".json"):
        with pytest.raises(UnsafeError, match="not a regular file"):
            read_json(folder / name)


@pytest.mark.parametrize("name", ["../../../../evil", "/tmp/evil", "..", "a/../../evil"])
def test_file_names_from_the_hub_are_not_followed(tmp_path: Path, name: str) -> None:
    """What a hub's index names is what is asked for and read; a name that leads out stops before either."""
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UnsafeError):
        HfSource(tmp_path)


@pytest.mark.parametrize("name", ["ab/" + "ab" * 32, "cd/" + "ab" * 32, "ab/notes", "ab/ab/" + "ab" * 32])
@pytest.mark.parametrize("marker", [".huggingface-shared-blobs", "other"])
def test_a_link_of_the_hubs_cache_leads_to_its_own_files_only(tmp_path: Path, name: str, marker: str) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1234"
    shared = tmp_path / "blobs" / name
    for folder in (snapshot, shared.parent):
        folder.mkdir(parents=True)
    shared.write_bytes(b"x")
    (tmp_path / "blobs" / marker).touch()
    (snapshot / "weights").symlink_to(shared)
    if name.startswith("ab/abab") and marker != "other":
        assert RangeReader(snapshot).read("weights", 0, 1) == b"x"
    else:
        with pytest.raises(UnsafeError, match="link out of its folder"):
            RangeReader(snapshot).read("weights", 0, 1)
