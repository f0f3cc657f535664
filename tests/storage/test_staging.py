"""One writer a target; whole or not at all; what a dead writer leaves blocks nobody."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptool.errors import LockedError, TargetExistsError
from ckptool.storage import exchange as exchange_module
from ckptool.storage import lock, staging
from ckptool.storage.exchange import exchange
from ckptool.storage.lock import Owner, acquire, is_stale, owner_of
from ckptool.storage.staging import create_staging, is_staging, recover, staged_directory, staged_file, staging_path


def write(target: Path, text: str, overwrite: bool = False) -> None:
    with staged_directory(target, overwrite) as folder:
        (folder / ".metadata").write_text(text)


def text_of(target: Path) -> str:
    return (target / ".metadata").read_text()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave_staging(target: Path, owner: Owner, **changes: object) -> Path:
    """A staging folder with some content, as another process would have it."""
    folder = staging_path(target)
    (folder / "content-old").mkdir(parents=True)
    (folder / "content-old" / "half").write_text("half")
    (folder / dataclasses.replace(owner, **changes).file_name).touch()  # type: ignore[arg-type]
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_published_whole_and_nothing_left_behind(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "step-1"
    with staged_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not target.exists()
        assert is_staging(staging_path(target))
    assert (target / "sub" / "file").read_text() == "x"
    assert names(target) == ["sub"] and names(target.parent) == ["step-1"]


def test_nothing_is_left_of_a_failed_writer(tmp_path: Path) -> None:
    for staged in (staged_directory, staged_file):
        with pytest.raises(KeyError), staged(tmp_path / "a"):
            raise KeyError
    assert names(tmp_path) == []


def test_a_taken_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    with pytest.raises(TargetExistsError):
        write(tmp_path / "a", "new")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(TargetExistsError):
        write(tmp_path / "dangling", "new")
    taken_meanwhile = create_staging(tmp_path / "b")
    taken_meanwhile.content.mkdir()
    (tmp_path / "b").write_text("mine")
    with pytest.raises(TargetExistsError):
        taken_meanwhile.publish()
    assert (tmp_path / "b").read_text() == "mine" and text_of(tmp_path / "a") == "old"


@pytest.mark.parametrize("swap", [True, False])
def test_overwriting(tmp_path: Path, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swap:
        monkeypatch.setattr(staging, "exchange", lambda a, b: False)
    write(tmp_path / "a", "old")
    write(tmp_path / "a", "new", overwrite=True)
    write(tmp_path / "b", "first", overwrite=True)
    assert (text_of(tmp_path / "a"), text_of(tmp_path / "b")) == ("new", "first")
    for text in ("one", "two"):
        with staged_file(tmp_path / "file.pt", overwrite=True) as path:
            path.write_text(text)
    assert (tmp_path / "file.pt").read_text() == "two"
    assert names(tmp_path) == ["a", "b", "file.pt"]


def test_a_folder_of_other_things_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(TargetExistsError, match="without a model"):
        write(tmp_path / "home", "new", overwrite=True)
    assert names(tmp_path) == ["home"]


def test_the_kernel_swaps(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").mkdir()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this filesystem can't exchange two names")
    assert (tmp_path / "b").read_text() == "a" and (tmp_path / "a").is_dir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "absent")


def test_where_nothing_can_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_renameat2", lambda: None)
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    assert exchange(tmp_path / "a", tmp_path / "b") is False


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = create_staging(tmp_path / "a")
    with pytest.raises(LockedError, match=rf"process {os.getpid()} on {socket.gethostname()} since \d+ s") as caught:
        create_staging(tmp_path / "a")
    assert "wait" in caught.value.hint
    first.discard()
    create_staging(tmp_path / "a").discard()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": dead_pid()},
        {"started": "1"},
        {"boot": "another"},
    ],
    ids=["ended", "pid used again", "machine started anew"],
)
def test_a_dead_owner_is_replaced(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = leave_staging(tmp_path / "a", Owner.this_process(), **changes)
    assert is_stale(folder)
    write(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == [".metadata"]


@pytest.mark.parametrize("changes", [{"host": "another,host"}, {"pid_namespace": "pid:[1]"}])
def test_an_owner_out_of_sight_is_gone_after_minutes_of_silence(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = leave_staging(tmp_path / "a", Owner.this_process(), **changes)
    for age_seconds, stale in ((400, True), (200, False)):
        then = time.time() - age_seconds
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (time.time() - 9999, time.time() - 9999))
        os.utime(folder / "content-old" / "half", (then, then))
        assert is_stale(folder) is stale
    with pytest.raises(LockedError, match=r"last wrote 20\d s ago"):
        create_staging(tmp_path / "a")


def test_a_living_owner_keeps_its_lock_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    staging = create_staging(tmp_path / "a")
    file = staging.lock.folder / staging.lock.owner.file_name
    os.utime(file, (0, 0))
    deadline = time.monotonic() + 10
    while file.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert file.stat().st_mtime > 0
    staging.discard()
    assert staging.lock.stopped.is_set()


def test_a_patient_writer_waits_for_one_out_of_sight(tmp_path: Path) -> None:
    """A run moved to another machine meets the lock of its own dead save."""
    folder = leave_staging(tmp_path / "a", Owner.this_process(), host="another")
    with pytest.raises(LockedError):
        create_staging(tmp_path / "a", patience_seconds=0.1)
    then = time.time() - lock.SILENCE_LIMIT_SECONDS + 1
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))
    create_staging(tmp_path / "a", patience_seconds=30).discard()
    assert names(tmp_path) == []


def test_owners_survive_being_file_names() -> None:
    owner = dataclasses.replace(Owner.this_process(), host="a,b/c.d e")
    assert Owner.parse(owner.file_name) == owner and "/" not in owner.file_name
    for name in ("owner,a,b", "owner,a,b,c,d,e,f", "ckptool.json"):
        assert Owner.parse(name) is None


def test_one_that_was_taken_over_does_not_publish(tmp_path: Path) -> None:
    slow = create_staging(tmp_path / "a")
    slow.content.mkdir()
    folder = slow.lock.folder
    (folder / slow.lock.owner.file_name).rename(folder / dataclasses.replace(slow.lock.owner, pid=dead_pid()).file_name)
    write(tmp_path / "a", "theirs")
    with pytest.raises(LockedError, match="taken over"):
        slow.publish()
    slow.discard()
    assert text_of(tmp_path / "a") == "theirs"


def test_of_many_takers_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_number in range(10):
        folder = leave_staging(tmp_path / f"a{round_number}", Owner.this_process(), pid=dead_pid())
        barrier, results = context.Barrier(6), context.SimpleQueue()
        takers = [context.Process(target=take, args=(folder, barrier, results)) for _ in range(6)]
        for taker in takers:
            taker.start()
        outcomes = [results.get() for _ in takers]
        for taker in takers:
            taker.join()
        assert sorted(outcomes) == ["LockedError"] * 5 + ["won"]


def take(folder: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    try:
        acquire(folder)
        outcome = "won"
    except LockedError as error:
        outcome = type(error).__name__
    results.put(outcome)  # type: ignore[attr-defined]
    barrier.wait()  # type: ignore[attr-defined]  # the winner lives until all have tried


def test_what_dead_writers_left_beside_the_lock_goes_too(tmp_path: Path) -> None:
    dead = dataclasses.replace(Owner.this_process(), pid=dead_pid())
    for name, owner in ((".a.staging-1", dead), (".a.staging-2", Owner.this_process()), (".a.staging-3", None)):
        (tmp_path / name).mkdir()
        if owner:
            (tmp_path / name / owner.file_name).touch()
    write(tmp_path / "a", "new")
    assert names(tmp_path) == [".a.staging-2", "a"]


def test_a_folder_in_the_way_that_is_no_lock(tmp_path: Path) -> None:
    staging_path(tmp_path / "a").mkdir()
    (staging_path(tmp_path / "a") / "thing").touch()
    with pytest.raises(LockedError, match="nothing says whose"):
        create_staging(tmp_path / "a")
    assert (staging_path(tmp_path / "a") / "thing").exists() and owner_of(staging_path(tmp_path / "a")) is None


def test_a_replaced_target_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    folder = leave_staging(tmp_path / "a", Owner.this_process())
    (tmp_path / "a").rename(folder / "replaced")
    recover(tmp_path / "a")
    assert not (tmp_path / "a").exists(), "its writer lives and is about to finish"
    held = next(folder.glob("owner,*"))
    held.rename(folder / dataclasses.replace(Owner.this_process(), pid=dead_pid()).file_name)
    recover(tmp_path / "a")
    assert text_of(tmp_path / "a") == "old" and names(tmp_path) == ["a"]


def test_two_processes_of_one_pid_are_told_apart() -> None:
    assert lock.owner_of(Path("/nonexistent")) is None
    assert Owner.this_process().is_gone(1e9) is False
    assert dataclasses.replace(Owner.this_process(), started="0").is_gone(0)
