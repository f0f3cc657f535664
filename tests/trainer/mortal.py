"""The trainer with a rank that fails: `python -m tests.trainer.mortal HOW RANK STEP [trainer's options]`.

In the step after STEP the rank dies, raises or hangs (HOW), in its first life only; or it sleeps in every step.
"""

import os
import signal
import sys
import time

from trainer import cli, train
from trainer.data import TrainingData

SLEEP_SECONDS = 0.3


def arm(how: str, rank: int, step: int) -> None:
    """Make this process fail, if it is the rank."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or int(os.environ["RANK"]) != rank:
        return
    clip_gradients, micro_batches = train.clip_gradients, TrainingData.micro_batches

    def clip_and_fail(state, max_norm):
        if state.step == step:
            fail(how)
        return clip_gradients(state, max_norm)

    def sleep_and_read(self, *arguments):
        time.sleep(SLEEP_SECONDS)
        return micro_batches(self, *arguments)

    if how == "sleeps":
        TrainingData.micro_batches = sleep_and_read
    else:
        train.clip_gradients = clip_and_fail


def fail(how: str) -> None:
    match how:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("this rank has had enough")
        case "hangs":
            time.sleep(600)


if __name__ == "__main__":
    arm(sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    cli.main()
