"""S3 over HTTP, spoken to by s3fs."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, NotFoundError
from ckptool.ops.copy import copy
from ckptool.ops.ls import ls
from ckptool.storage.place import place
from ckptool.storage.store import Store
from tests.stores.conftest import SECRET_KEY

S3 = fsspec.AbstractFileSystem


def test_from_bucket_to_bucket_and_back(s3: S3, hub_folder: Path) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    ckptool.import_hf("s3://bucket/tiny", root=place("s3://bucket/runs"))
    assert ckptool.verify("s3://bucket/runs/tiny", level="content", against=str(hub_folder)).exit_code == 0
    ckptool.export("s3://bucket/runs/tiny")
    assert ckptool.diff("s3://bucket/runs/tiny-hf", "s3://bucket/tiny").equal


def test_a_changed_object_is_an_error(s3: S3) -> None:
    s3.pipe("bucket/data", b"first")
    source = Store("s3://bucket")
    assert source.file("data").num_bytes == 5
    s3.pipe("bucket/data", b"other")
    with pytest.raises(DamagedError, match="changed while it was read"):
        source.read_into("data", 0, memoryview(bytearray(5)))


def test_versions_of_an_object_are_told_apart(s3: S3, root: Path) -> None:
    s3.call_s3("put_bucket_versioning", Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})
    copy("step-5", "s3://bucket/step-5", root=root)
    copy("step-5", "s3://bucket/step-5", root=root, overwrite=True)
    assert ckptool.verify("s3://bucket/step-5").exit_code == 0


def test_large_files_go_up_in_parts(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(range(256)) * (160 << 10))
    target = Store("s3://bucket/large")
    stored = target.put("", tmp_path / "large")
    assert stored.identity.strip('"').endswith("-3")
    read = bytearray(5 << 20)
    target.read_into("", (16 << 20) - 1000, memoryview(read))
    assert read == (tmp_path / "large").read_bytes()[(16 << 20) - 1000 :][: 5 << 20]


def test_a_missing_bucket_is_not_made(s3: S3, root: Path) -> None:
    with pytest.raises(NotFoundError):
        copy("step-5", "s3://no-such-bucket/step-5", root=root)
    assert not s3.exists("no-such-bucket")


def test_a_listing_takes_one_call(s3: S3, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(50):
        s3.pipe(f"bucket/runs/step-{step}/.metadata", b"")
    calls: list[str] = []
    original = type(s3)._call_s3

    async def counted(self: S3, method: str, *args: object, **kwargs: object) -> object:
        calls.append(method)
        return await original(self, method, *args, **kwargs)

    monkeypatch.setattr(type(s3), "_call_s3", counted)
    rows = ls(place("s3://bucket/runs")).details["checkpoints"]
    assert len(rows) == 50 and all(row["complete"] for row in rows)
    assert len(calls) <= 1


def test_keys_never_appear(s3: S3, hub_folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    url = f"s3://name:{SECRET_KEY}@bucket/tiny"
    run(["import-hf", url, str(tmp_path / "m"), "--json"])
    run(["import-hf", "s3://bucket/tiny", str(tmp_path / "n"), "--json"])
    run(["import-hf", f"{url}/absent", str(tmp_path / "o")])
    captured = capfd.readouterr()
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json"))
    assert SECRET_KEY not in captured.out + captured.err + written
    assert json.loads((tmp_path / "n" / "ckptool.json").read_text())["source"]["url"] == "s3://bucket/tiny"
