"""The trainer with a rank that dies: `python -m tests.trainer.mortal RANK STEP [trainer's options]`.

The rank kills itself in the step after STEP, in its first life only.
"""

import os
import signal
import sys

from trainer import cli, train

RANK, STEP = int(sys.argv.pop(1)), int(sys.argv.pop(1))
_clip_gradients = train.clip_gradients


def clip_gradients(state, max_norm):
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_life and int(os.environ["RANK"]) == RANK and state.step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    return _clip_gradients(state, max_norm)


if __name__ == "__main__":
    train.clip_gradients = clip_gradients
    cli.main()
