"""Were all ranks told the same? On several nodes each has a command line and a --config file of its own."""

from __future__ import annotations

import socket

from ckptool import UsageError
from trainer.config import TrainConfig
from trainer.parallel import Ranks

#: Whether what these name is one folder is for `check_shared_root` to say.
_FOLDERS = {"root", "work_dir"}


def check_same_options(config: TrainConfig, ranks: Ranks) -> None:
    """Raises UsageError on every rank when their options differ. Some would let ranks wait for each other for ever,
    others would train parts of one model in different ways."""
    told = ranks.gather((socket.gethostname(), vars(config)))
    (_, first), others = told[0], told[1:]
    for rank, (host, options) in enumerate(others, start=1):
        for name in sorted((first.keys() | options.keys()) - _FOLDERS):
            # As text: NaN is refused later, for what it is, and another version of the trainer lacks an option.
            theirs, ours = (repr(told_to[name]) if name in told_to else "unknown" for told_to in (options, first))
            if theirs != ours:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {theirs} on rank {rank} ({host}) and {ours} on "
                    f"rank 0 ({told[0][0]})",
                    hint="start all ranks with one command, and with the same --config file on all nodes",
                )
