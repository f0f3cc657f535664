"""Conversions over a network that breaks: they finish, or stop with one line and go on; nothing half is ever seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import ckptool
from ckptool.cli.main import run
from ckptool.errors import StorageError
from ckptool.ops.copy import copy
from ckptool.storage import store
from ckptool.storage.place import place
from tests.stores.proxy import Faults, Proxy, proxied

S3 = fsspec.AbstractFileSystem


@pytest.fixture
def proxy(s3: S3, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between ckptool and S3; the client `s3` goes past it."""
    with proxied(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        fsspec.filesystem("s3").clear_instance_cache()
        yield proxy
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(latency_s=0.02), marks=pytest.mark.slow),
        Faults("cut", every=8),
        Faults("short", every=8, after_bytes=900),
        pytest.param(Faults("refuse", every=8), marks=pytest.mark.slow),
        pytest.param(Faults(bytes_per_s=2e6), marks=pytest.mark.slow),
    ],
    ids=["latency", "cut", "short", "503", "slow"],
)
def test_an_import_from_bucket_to_bucket_finishes(s3: S3, proxy: Proxy, hub_folder: Path, faults: Faults) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    proxy.faults = faults
    ckptool.import_hf("s3://bucket/tiny", "m", root=place("s3://bucket/runs"))
    assert not faults.every or proxy.num_spoilt > 2
    proxy.faults = Faults()
    assert ckptool.verify("s3://bucket/runs/m", level="content", against=str(hub_folder)).exit_code == 0


@pytest.mark.parametrize("kind", ["refuse", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_store_that_is_gone_ends_in_one_line_and_the_next_attempt_goes_on(
    s3: S3, proxy: Proxy, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(store, "_NUM_ATTEMPTS", 3)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    original = store.Store.put

    def put(self: store.Store, name: str, path: Path) -> store.StoredFile:
        if name.endswith(".distcp"):
            proxy.faults = Faults(kind, every=1, after_bytes=0)  # from here on nothing comes through
        return original(self, name, path)

    monkeypatch.setattr(store.Store, "put", put)
    assert run(["copy", str(root / "step-5"), "s3://bucket/runs/step-5", "--quiet"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: s3://bucket/runs/step-5") and "the store failed 3 times" in said[0]
    assert len(said) == 2 and said[1].startswith("hint: ")
    assert not s3.exists("bucket/runs/step-5/.metadata")
    monkeypatch.setattr(store.Store, "put", original)
    proxy.faults = Faults()
    copy(str(root / "step-5"), "s3://bucket/runs/step-5")
    assert ckptool.verify("s3://bucket/runs/step-5").exit_code == 0


def test_a_server_that_says_nothing_is_given_up(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_NUM_ATTEMPTS", 2)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    monkeypatch.setattr("s3fs.core.S3FileSystem.read_timeout", 0.5)
    proxy.faults = Faults(latency_s=30)
    start = time.monotonic()
    with pytest.raises(StorageError, match="the store failed 2 times"):
        ckptool.verify("s3://bucket/runs/step-5")
    assert time.monotonic() - start < 20
