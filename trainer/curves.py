"""The numbers of `metrics.jsonl` as curves, in TensorBoard and in Weights & Biases.

Both are conveniences: whatever goes wrong with one is said once, and training goes on without it.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ckptool import UsageError

BOARDS = ("tensorboard", "wandb")
AUTO = "auto"
NONE = "none"
#: What a crash may cost of a curve; metrics.jsonl has it all the same.
_FLUSH_SECONDS = 10


class Board(Protocol):
    """Something that draws curves."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take in the numbers of a finished step."""

    def close(self) -> None:
        """Bring everything to where it belongs."""


def parse_boards(text: str) -> tuple[str, ...]:
    """`auto`, `none`, or names with commas between them, as names of BOARDS. auto is TensorBoard where it is installed.

    Raises UsageError for other names, and for libraries that are not installed.
    """
    if text == AUTO:
        return ("tensorboard",) if _is_installed("tensorboard") else ()
    names = () if text == NONE else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BOARDS:
            raise UsageError(f"--log-to {text}: choose from {', '.join(BOARDS)}, or {AUTO} or {NONE}")
        if not _is_installed(name):
            raise UsageError(f"--log-to {name}: {name} is not installed", hint=f"pip install 'ckptool[{name}]'")
    return names


class Curves:
    """Draws on the boards of these names, of a run under `folder` that has finished `step` steps. A context.

    Points of later steps, which a killed job has left, are replaced.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, step: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._boards: dict[str, Board] = {}
        for name in names:
            try:
                self._boards[name] = _OPEN[name](folder, step)
            except Exception as error:
                self._give_up(name, error)

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._each(lambda board: board.close())

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in the record of a step; what is no number is left out."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step"
        }
        self._each(lambda board: board.add(step, numbers))

    def _each(self, do: Callable[[Board], None]) -> None:
        for name, board in list(self._boards.items()):
            try:
                do(board)
            except Exception as error:
                del self._boards[name]
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._say(f"note: no curves in {name} from here on, training goes on: {reason}")


class _TensorBoard:
    """Event files in FOLDER/tensorboard; `purge_step` makes TensorBoard drop what was lost in a crash."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1, flush_secs=_FLUSH_SECONDS)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases that all starts of the job share; its files are in FOLDER/wandb.

    It takes no step twice: of steps that are trained again it keeps the points of the first time.
    """

    def __init__(self, folder: Path, step: int) -> None:
        import wandb

        identity = _identity(folder / ".wandb-run", is_new=step == 0)
        self._run = wandb.init(id=identity, resume="allow", dir=folder, name=folder.name or None, reinit="create_new")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


_OPEN: dict[str, Callable[[Path, int], Board]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def _identity(file: Path, is_new: bool) -> str:
    """The name under which Weights & Biases knows the run; a new one for a run that begins."""
    if is_new or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
