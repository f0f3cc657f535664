"""Running an attack in a process of its own, with little memory and little time: a crash or a bomb stays there."""

from __future__ import annotations

import resource
import subprocess
import sys

MEMORY_BYTES = 1 << 30
SECONDS = 30

#: Prefix of every attacker's script: `refused(call)` runs it and gives the name of the ckptool error that it raised.
PREAMBLE = """
from ckptool.errors import CkptoolError

def refused(call, *arguments):
    try:
        call(*arguments)
    except CkptoolError as error:
        assert len(str(error)) < 2000 and "\\n" not in str(error), str(error)[:5000]
        return type(error).__name__
    return "accepted"
"""


def run_limited(script: str, *arguments: str, memory_bytes: int = MEMORY_BYTES, seconds: int = SECONDS) -> list[str]:
    """Run a script under limits; returns the lines it printed. Fails when it crashed or went over a limit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
        timeout=10 * seconds,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.splitlines()
