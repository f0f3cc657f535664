"""From a plan to a published checkpoint: staging, resuming, workers, ranks. What import, export and reshard share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3

from ckptool import __version__
from ckptool.core.budget import MemoryBudget
from ckptool.core.interfaces import Progress, Sink, Source
from ckptool.core.interruption import raise_if_interrupted
from ckptool.core.parts import FileRecord
from ckptool.core.plan import Plan
from ckptool.errors import CkptoolError, DamagedError, MismatchError, UnsafeError, UnsupportedError
from ckptool.formats.hf_consumed import original_name
from ckptool.ops.consume import Consumer
from ckptool.ops.head_start import Copying, at_once
from ckptool.storage.files import Place, os_errors
from ckptool.storage.journal import JOURNAL_PATTERN, Journal, read_journals
from ckptool.storage.kept_files import kept_files, remove_rest
from ckptool.storage.place import file_version
from ckptool.storage.staging import Staging, create_staging
from ckptool.storage.upload import Upload

if TYPE_CHECKING:
    from ckptool.ranks import Ranks

Value = TypeVar("Value")

GOES_ON = "the same command goes on from where this one stopped"


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a plan is carried out.

    `resume` goes on from what an interrupted attempt at the same work left. `ranks` are the processes that share the
    work out, on a filesystem that all of them see; None is this process alone. `progress(plan)` gives the counter of
    written bytes. `copying` runs the copy.
    """

    overwrite: bool = False
    resume: bool = True
    progress: Callable[[Plan], Progress] | None = None
    ranks: Ranks | None = None
    is_file: bool = False
    copying: Copying = at_once

    @property
    def world_size(self) -> int:
        return self.ranks.world_size if self.ranks else 1

    @property
    def is_first(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0


def convert(
    plan: Plan,
    source: Source,
    source_path: Place,
    target: Place,
    open_sink: Callable[[Path], Sink],
    how: Execution,
    *,
    before: Callable[[Path], None] = lambda content: None,
    after: Callable[[Path], None] = lambda content: None,
    consumer: Consumer | None = None,
    also: Sequence[str] = (),
) -> list[str]:
    """Carry out `plan` and publish what it makes as `target`; returns notes on what happened.

    `before(content)` puts beside the parts what must be there when the sink finishes, and `after(content)` what comes
    after it, both on one process; the first usually once the parts are written, and while they are with
    `how.copying` = `head_start.beside`. `consumer` is told of each part that is safe. An attempt that fails or is
    killed leaves nothing under the target's name; its finished parts are kept, and checked, for the next one with the
    same source and options. `also` is what else the tensors are made of, in words that change with it.
    """
    from ckptool import engine

    notes: list[str] = []
    key = fingerprint(plan, source_path, source.manifest.files, also)
    with _staged(target, key, how) as staging:
        content = staging.content
        done = _on_first(how, lambda: _parts_done(staging, plan, key, how, notes))
        sink = open_sink(content)
        rank, world_size = (how.ranks.rank, how.ranks.world_size) if how.ranks else (0, 1)
        left = [part for part in plan.parts if part.files[0] not in done]
        journal = Journal(content.parent, key, rank)

        part_of = {part.files[0]: part for part in plan.parts}
        if consumer:
            for file in done.keys() & part_of.keys():
                consumer.done(part_of[file], content)
        lock = threading.Lock()

        def on_done(records: list[FileRecord]) -> None:
            for record in records:
                if record.blake3 and isinstance(staging, Upload):
                    staging.keep(record, key)
            with lock, os_errors(content):
                for record in records:
                    if record.blake3 and not isinstance(staging, Upload):
                        journal.append(record.to_json())
                if consumer:
                    consumer.done(part_of[records[0].file], content)

        def begin() -> Progress | None:
            report = how.progress(plan) if how.progress else None
            if report:
                report(sum(part.write_bytes for part in plan.parts) - sum(part.write_bytes for part in left))
            return report

        def copy(report: Progress | None) -> list[FileRecord]:
            return engine.run(
                left[rank::world_size],
                source,
                sink,
                report,
                num_workers=plan.num_workers,
                budget=MemoryBudget(plan.memory_bytes),
                on_done=on_done,
            )

        with how.copying(lambda report: _on_all(how, lambda: copy(report)), begin) as copied:
            _on_first(how, lambda: before(content))
            records = copied()
        made = {record.file: record for record in [*done.values(), *records]}
        _on_first(how, lambda: sink.finish([made[file] for part in plan.parts for file in part.files]))
        _on_first(how, lambda: after(content))
    if consumer:
        consumer.all_done()
    return notes


def fingerprint(plan: Plan, source_path: Place, files: Collection[str], also: Sequence[str] = ()) -> str:
    """Equal for equal work: the same files, by name, size and time of change, and the same plan made of them.

    `files` are those that the source reads (none: all in its folder).
    """
    if files:
        found: dict[str, Place] = {original_name(file): source_path / file for file in files}
    else:
        everything: Iterator[Place] = source_path.rglob("*")
        found = {str(path).removeprefix(str(source_path)): path for path in everything if path.is_file()}
    if source_path.is_file():
        found = {source_path.name: source_path}
    versions = [(name, file_version(path)) for name, path in sorted(found.items())]
    hasher = blake3(json.dumps(versions).encode())
    for part in work_of(plan):
        hasher.update(repr(part).encode())
    hasher.update(repr([plan.verb, plan.source, plan.target, __version__, *also]).encode())
    return hasher.hexdigest()


def work_of(plan: Plan) -> list[list[Any]]:
    """What the plan does, comparable: its files, and what is made of what in each."""
    return [
        [part.files, *part.objects, *((item.label, item.sources, item.targets) for item in part.items)]
        for part in plan.parts
    ]


def _parts_done(
    staging: Staging | Upload, plan: Plan, key: str, how: Execution, notes: list[str]
) -> dict[str, FileRecord]:
    """What an interrupted attempt finished, by file; says so in `notes`."""
    if how.is_file:
        return {}
    if isinstance(staging, Upload):
        done, is_new = staging.begin(key, how.resume), False
        # Of parts with several files, all must be there.
        parts = [part for part in plan.parts if done.keys() >= set(part.files)]
        done = {file: done[file] for part in parts for file in part.files}
    else:
        done, is_new = _local_parts_done(staging.content, plan, key)
    if done:
        num_done = sum(part.files[0] in done for part in plan.parts)
        notes.append(f"went on from an interrupted attempt: {num_done} of {len(plan.parts)} parts were done")
    elif is_new and how.resume:
        notes.append("started over: the source or the options are not those of the interrupted attempt")
    return done


def _local_parts_done(content: Path, plan: Plan, key: str) -> tuple[dict[str, FileRecord], bool]:
    """The parts that an interrupted attempt finished, each read back and found whole; anything else it left is removed.

    Their journal is written anew, so that it holds nothing but these. Also returns whether there was any journal.
    """
    with os_errors(content):
        had_journal = any(content.parent.glob(JOURNAL_PATTERN))
        whole = kept_files(content, key)
        parts = [part for part in plan.parts if whole.keys() >= set(part.files)]
        done = {file: whole[file] for part in parts for file in part.files}
        remove_rest(content, key, done.values())
    return done, had_journal


@contextlib.contextmanager
def _staged(target: Place, key: str, how: Execution) -> Iterator[Staging | Upload]:
    """Yield what has the folder to write into, or the path of a file, and publish that when the block ends well.

    When it raises, what is there is removed, unless some parts were done that another attempt can go on from.
    """
    raise_if_interrupted()
    staging = _create(target, how)
    try:
        _make_content(staging, how)
        yield staging
        raise_if_interrupted()
        if isinstance(staging, Upload) and how.ranks:
            how.ranks.agree("conversion", staging.check_sent)
        _on_first(how, staging.publish)
        if isinstance(staging, Upload):
            staging.discard()
    except BaseException as error:
        leave(staging, key, error, how.is_first)
        raise


def leave(staging: Staging | Upload, key: str, error: BaseException, is_first: bool = True) -> None:
    """After `error`: keep the finished parts of the work `key` for another attempt and say so, or remove everything."""
    # What is wrong with the data is not put right by going on.
    is_useless = isinstance(error, DamagedError | MismatchError | UnsafeError | UnsupportedError)
    goes_on = False
    if isinstance(staging, Upload):
        goes_on = not is_useless and staging.has_kept
        staging.discard()
    elif is_first:
        goes_on = not is_useless and bool(read_journals(staging.content.parent, key))
        staging.suspend() if goes_on else staging.discard()
    if goes_on and isinstance(error, CkptoolError):
        error.hint = f"{error.hint}; {GOES_ON}" if error.hint else GOES_ON


def _create(target: Place, how: Execution) -> Staging | Upload:
    if isinstance(target, Path):
        keep_left = how.resume and not how.is_file
        return _on_first(how, lambda: create_staging(target, how.overwrite, is_file=how.is_file, keep_left=keep_left))

    def start() -> Upload:
        return Upload(target, how.overwrite, how.is_file)

    # Every rank has a folder of its own to upload from.
    return how.ranks.agree("conversion", start) if how.ranks else start()


def _make_content(staging: Staging | Upload, how: Execution) -> None:
    def make() -> None:
        if not staging.is_file:
            with os_errors(staging.content):
                staging.content.mkdir(exist_ok=True)

    make() if isinstance(staging, Upload) else _on_first(how, make)


def _on_first(how: Execution, step: Callable[[], Value]) -> Value:
    """Do `step` on one process; all get its result, or its error."""
    return how.ranks.on_first("conversion", step) if how.ranks else step()


def _on_all(how: Execution, step: Callable[[], list[Value]]) -> list[Value]:
    """Do `step` on every process; all get all results, or the first error."""
    if how.ranks is None:
        return step()
    mine = how.ranks.agree("conversion", step)
    return [value for values in how.ranks.gather(mine, "conversion") for value in values]
