"""The trainer with a rank that fails: `python -m tests.trainer.mortal HOW RANK STEP [trainer's options]`.

In the step after STEP the rank dies, raises or hangs (HOW), in its first life only.
"""

import os
import signal
import sys
import time

from trainer import cli, train

HOW, RANK, STEP = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
_clip_gradients = train.clip_gradients


def clip_gradients(state, max_norm):
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_life and int(os.environ["RANK"]) == RANK and state.step == STEP:
        fail()
    return _clip_gradients(state, max_norm)


def fail():
    match HOW:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("this rank has had enough")
        case "hangs":
            time.sleep(600)


if __name__ == "__main__":
    train.clip_gradients = clip_gradients
    cli.main()
