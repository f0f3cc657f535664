"""What a failure is to the other ranks."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass

from ckptool import CkptoolError
from trainer.stopwatch import Stopwatch

#: How gloo, NCCL and the store say that the other end of a connection is gone.
_LOST_CONTACT = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "lost contact",
    "remote process exited",
    "imed out",
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends: the rank where it began, its host, its step and phase. `is_expected`: an error of ours."""

    rank: int
    host: str
    step: int
    phase: str
    cause: str
    exit_code: int = 1
    is_expected: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, stopwatch: Stopwatch) -> Failure:
        is_expected = isinstance(error, CkptoolError)
        cause = str(error) if is_expected else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, CkptoolError) else 1
        return cls(rank, socket.gethostname(), stopwatch.step, stopwatch.phase, cause, code, is_expected)

    def line(self) -> str:
        return f"rank {self.rank} on {self.host} failed in step {self.step + 1} ({self.phase}): {self.cause}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))


def is_lost_contact(error: BaseException) -> bool:
    """True when the error only says that another rank is gone: that one's own error is the cause."""
    return isinstance(error, (RuntimeError, CkptoolError)) and any(text in str(error) for text in _LOST_CONTACT)
