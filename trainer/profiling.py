"""`--profile STEP:N`: a torch.profiler trace of N steps, and a short table of where their time went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainer.metrics import Log
from trainer.parallel import Ranks

#: Kinds of work by what their kernels and operators are called, tried in this order.
_KINDS = (
    ("communication", ("nccl", "gloo", "all_gather", "reduce_scatter", "all_reduce", "c10d::")),
    ("attention", ("flash", "attention", "fmha", "sdpa")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::matmul")),
)
Interval = tuple[float, float]


class Profile:
    """Profiles the steps `first` to `first + number - 1` on every rank; nothing when `number` is 0."""

    def __init__(self, first: int, number: int, folder: Path, ranks: Ranks, log: Log) -> None:
        self._first, self._last = first, first + number - 1
        self._folder, self._ranks, self._log = folder, ranks, log
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Call before step `step`, counted from 1."""
        if self._last >= self._first > 0 and step == self._first:
            activities = [ProfilerActivity.CPU]
            if self._ranks.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """Call after step `step`: the last one writes ROOT/profile/ and says the table."""
        if self._profile is None or step != self._last:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._first}-{self._last}-rank-{self._ranks.rank}.json"
        self._profile.export_chrome_trace(str(path))
        for line in table(list(self._profile.events() or []), self._ranks.device.type):
            self._log.say(line)
        self._log.say(f"traces are in {self._folder}: open one in https://ui.perfetto.dev")
        self._profile = None


def table(events: list[Any], device_type: str) -> list[str]:
    """Lines of kind, seconds and share: of the GPU's kernels, or of a CPU's operators without what they call."""
    if device_type != "cuda":
        seconds: dict[str, float] = {}
        for event in events:
            kind = kind_of(event.name)
            seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
        whole = sum(seconds.values())
        return [_line(kind, value, whole) for kind, value in sorted(seconds.items(), key=lambda item: -item[1])]
    spans: dict[str, list[Interval]] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spans.setdefault(kind_of(event.name), []).append((event.time_range.start, event.time_range.end))
    busy = [span for of_kind in spans.values() for span in of_kind]
    if not busy:
        return ["profile: no kernel ran on the GPU"]
    whole = (max(end for _, end in busy) - min(start for start, _ in busy)) / 1e6
    lines = [_line(kind, covered(of_kind) / 1e6, whole) for kind, of_kind in spans.items()]
    lines.append(_line("idle", whole - covered(busy) / 1e6, whole))
    communication = spans.get("communication", [])
    if communication:
        compute = [span for kind, of_kind in spans.items() if kind != "communication" for span in of_kind]
        hidden = covered(communication) + covered(compute) - covered(communication + compute)
        lines.append(f"{hidden / covered(communication):.0%} of the communication runs beside other kernels")
    return lines


def kind_of(name: str) -> str:
    """The kind of work of a kernel or operator."""
    lower = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lower for word in words)), "other")


def covered(spans: list[Interval]) -> float:
    """The length of the union of intervals, in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _line(kind: str, seconds: float, whole: float) -> str:
    return f"profile: {kind:16} {seconds:8.3f} s  {seconds / max(whole, 1e-12):4.0%}"
