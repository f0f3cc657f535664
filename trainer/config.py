"""TrainConfig: everything a run is told, checked once."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool import NotFoundError, UsageError
from trainer.curves import parse_boards

#: The value of --lora-targets that names every linear layer but the output head.
ALL_LINEAR = "all-linear"

#: Options that may be given several times.
_LISTS = {"data", "eval_data"}


@dataclass(frozen=True)
class TrainConfig:
    """The options of `python -m trainer`, by the same names; `cli.py` has their defaults and their meaning.

    A `root` that is a URL is a str.
    """

    init_from: str | None
    data: tuple[str, ...]
    unit: str
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    steps: int
    lr: float
    warmup_steps: int
    schedule: str
    optimizer: str
    weight_decay: float
    grad_clip: float
    on_nonfinite: str
    hang_minutes: float
    save_every: int
    save_every_minutes: float
    async_save: bool
    keep_last: int
    keep_every: int
    root: Path | str
    work_dir: Path
    upload_to: str
    upload_mb_per_s: float
    resume: str
    seed: int
    accept_data_change: str
    device: str
    dp_replicate: int
    tp: int
    cpu_offload: bool
    reshard_after_forward: bool
    deterministic: bool
    activation_checkpointing: str
    compile: bool
    compile_cache: bool
    fp8: str
    loss: str
    log_every: int
    log_to: str
    straggler_factor: float
    profile: str
    eval_data: tuple[str, ...]
    eval_every: int
    eval_units: int
    param_dtype: str
    stochastic_rounding: bool
    lora_rank: int
    lora_alpha: float
    lora_targets: str
    compute_dtype: str
    log_samples: bool

    @property
    def work(self) -> Path:
        """The folder of all that is no checkpoint: metrics, token cache, traces, notes of failures."""
        return self.root if isinstance(self.root, Path) else self.work_dir

    @property
    def places(self) -> list[Path | str]:
        """Where checkpoints of the run are, the quickest first."""
        return [self.root, self.upload_to] if self.upload_to else [self.root]

    def check(self, num_data_ranks: int) -> None:
        """Raises UsageError for values that can't mean a run on ranks that share the data in `num_data_ranks` parts."""
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"--{name.replace('_', '-')} {value} is no number to train with")
        if parse_profile(self.profile)[0] > self.steps:
            raise UsageError(f"--profile {self.profile} begins after the last step, {self.steps}")
        if self.upload_to and not isinstance(self.root, Path):
            raise UsageError("--upload-to brings checkpoints from a local --root to another place, and --root is a URL")
        if self.upload_to and Path(self.upload_to).resolve() == Path(self.root).resolve():
            raise UsageError("--upload-to brings checkpoints from --root to another place, and it is the root")
        if self.upload_mb_per_s and not self.upload_to:
            raise UsageError("--upload-mb-per-s says nothing without --upload-to")
        for name in ("init_from", "resume"):
            if getattr(self, name) == "":
                raise UsageError(f"--{name.replace('_', '-')} is empty", hint="a shell variable that was not set?")
        parse_boards(self.log_to)
        if not self.data:
            raise UsageError("no training data", hint="--data PATH, or data = [...] in the --config file")
        if num_data_ranks > self.global_batch_size:
            raise UsageError(
                f"{num_data_ranks} ranks can't share a global batch of {self.global_batch_size} windows",
                hint="raise --global-batch-size, or start fewer ranks",
            )
        if not self.lora_rank and (self.lora_alpha or self.lora_targets != ALL_LINEAR):
            raise UsageError("--lora-alpha and --lora-targets say nothing without --lora-rank", hint="--lora-rank 16")
        if self.compile_cache and not self.compile:
            raise UsageError("--compile-cache says nothing without --compile")
        if self.lora_rank and self.tp > 1:
            raise UsageError("--lora-rank can't be had with --tp", hint="one of the two; FSDP2 shards an adapter too")
        if self.fp8 != "none" and (self.lora_rank or self.tp > 1):
            other = "--lora-rank" if self.lora_rank else "--tp"
            raise UsageError(f"--fp8 can't be had with {other}", hint="one of the two; FSDP2 goes with either")

    def saves_after(self, step: int) -> bool:
        """True when a checkpoint is due once `step` steps are done."""
        return step == self.steps or (self.save_every > 0 and step % self.save_every == 0)

    def evaluates_after(self, step: int) -> bool:
        """True when the held-out loss is due once `step` steps are done."""
        return bool(self.eval_data) and (step == self.steps or (self.eval_every > 0 and step % self.eval_every == 0))

    def saves_at_age(self, seconds: float) -> bool:
        """True when the newest checkpoint is so old that another is due at the next step boundary."""
        return 0 < self.save_every_minutes * 60 <= seconds


def parse_profile(text: str) -> tuple[int, int]:
    """STEP:N as numbers; (0, 0) for "". Raises UsageError for anything else."""
    if not text:
        return 0, 0
    first, _, number = text.partition(":")
    if not (first.isdigit() and number.isdigit() and int(first) > 0 and int(number) > 0):
        raise UsageError(f"--profile {text}: should be STEP:N, two numbers from 1", hint="--profile 10:3")
    return int(first), int(number)


def read_defaults(path: Path, known: set[str]) -> dict[str, Any]:
    """Option defaults from a TOML file; `seq-len` and `seq_len` name the same option.

    Values are as the command line would give them: `1.5` is no number of steps there, and `true` no learning rate.
    Raises UsageError for keys that are not in `known` and for values of no option's type, NotFoundError when there is
    no such file.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    unknown = sorted({key.replace("-", "_") for key in table} - known)
    if unknown:
        raise UsageError(f"{path}: unknown option {', '.join(unknown)}", hint="python -m trainer --help lists them")
    values = {key.replace("-", "_"): _as_typed(value, f"{path}: {key}") for key, value in table.items()}
    if len(values) < len(table):
        raise UsageError(f"{path}: an option is there twice, with - and with _ in its name")
    return {name: [value] if name in _LISTS and isinstance(value, str) else value for name, value in values.items()}


def _as_typed(value: Any, where: str) -> str | list[str]:
    """A value of TOML as a person would type it."""
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(each, str) for each in value):
            return value
    raise UsageError(f"{where} should be a string, a number, true or false, or a list of strings")
