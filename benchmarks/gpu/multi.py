"""Importing, training, saving, dying and resuming on the GPUs of one host, through NCCL.

    python benchmarks/gpu/multi.py --size small
    python benchmarks/gpu/multi.py --size tiny --device cpu --ranks 2

A model of random weights is made and imported, and the trainer runs from it under torchrun. One run goes through
without a break: the others die, resume on other numbers of ranks, and must have fed the same samples and found the same
losses but for rounding. Each section stands alone: one that fails, or runs out of time, becomes a row that says so.
With `--only`, rows that were written before of other sections stay.
Writes benchmarks/results/multi-{device}{ranks}-{size}.md and .jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from random_model import SIZES

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
PROGRAMS = Path(__file__).parent / "rank_programs.py"
MODEL_MAKER = Path(__file__).parent / "random_model.py"

NUM_STEPS, SAVE_EVERY = 12, 4
NUM_SAVES = 3
WARMUP_STEPS = 3  # steps whose speed is not counted
COMMAND_SECONDS = 240

PARAM_DTYPES = {"tiny": "fp32", "small": "fp32", "8b": "bf16"}

Row = dict[str, Any]


@dataclass
class Host:
    """Where everything is, what there is, and until when."""

    work: Path
    device: str
    size: str
    num_ranks: int
    deadline: float
    rows: list[Row] = field(default_factory=list)

    @property
    def base(self) -> Path:
        return self.work / "base"

    @property
    def reference(self) -> Path:
        """The root of the run that goes through without a break."""
        return self.work / "reference"

    @property
    def seq_len(self) -> int:
        return SIZES[self.size]["seq_len"]

    @property
    def global_batch_size(self) -> int:
        """One sequence a rank and step, so that no gradients are accumulated on all ranks."""
        return self.num_ranks

    def note(self, section: str, what: str, **numbers: Any) -> None:
        """Keep a row, and show it."""
        row = {"section": section, "what": what, **numbers}
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def run(self, command: list[Any], must_fail: bool = False) -> str:
        """Run a command, in time, and return what it said. Raises RuntimeError with the end of its stderr."""
        left = min(COMMAND_SECONDS, self.deadline - time.monotonic())
        if left <= 0:
            raise RuntimeError("no time is left")
        python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1" if self.is_cpu else "4"}
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, err = process.communicate()
            raise RuntimeError(f"not done after {left:.0f} s: {err[-500:]}") from None
        if bool(process.returncode) != must_fail:
            raise RuntimeError(f"exit code {process.returncode}: {err[-1500:]}")
        return out + err

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def torchrun(self, num_ranks: int) -> list[Any]:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]

    def ckptool(self, *arguments: Any, num_ranks: int = 1) -> float:
        """Run a command of ckptool, on so many processes that share its work; returns its seconds, start included."""
        start = [sys.executable] if num_ranks == 1 else self.torchrun(num_ranks)
        began = time.monotonic()
        self.run([*start, "-m", "ckptool", *arguments])
        return round(time.monotonic() - began, 2)

    def options(self, root: Path, num_steps: int, **options: Any) -> list[Any]:
        """The trainer's options; the schedule doesn't depend on the number of steps."""
        chosen = {
            "root": root,
            "steps": num_steps,
            "init_from": self.base,
            "data": self.work / "text",
            "seq_len": self.seq_len,
            "global_batch_size": self.global_batch_size,
            "save_every": SAVE_EVERY,
            "schedule": "constant",
            "lr": 1e-4,
            "device": self.device,
            "param_dtype": PARAM_DTYPES[self.size],
            "activation_checkpointing": "block",
            "log_every": 100,
            "keep_last": 0 if root == self.reference else 1,
            **options,
        }
        # Attention's gradients are summed in any order, and in some steps that shows. The big size is for the speed.
        flags = ["--log-samples", *([] if self.size == "8b" else ["--deterministic"])]
        return [*flags, *(x for name, value in chosen.items() for x in (f"--{name.replace('_', '-')}", value))]

    def train(self, root: Path, num_ranks: int, num_steps: int = NUM_STEPS, **options: Any) -> str:
        """Run the trainer to step `num_steps`; returns what it said."""
        start = [sys.executable] if num_ranks == 1 else self.torchrun(num_ranks)
        return self.run([*start, "-m", "trainer", *self.options(root, num_steps, **options)])


def main_sections() -> dict[str, Callable[[Host], None]]:
    """The sections after the model is made, the most important first."""
    return {
        "reference": train_reference,
        "saves": save_beside_training,
        "kill": kill_in_save,
        "half": resume_on_half,
        "load": load_with_each_reader,
        "meshes": train_on_meshes,
        "reshard": resume_resharded,
        "one": train_on_one,
        "scaling": share_conversions,
    }


def prepare(host: Host) -> None:
    """A Hugging Face folder of random weights with a byte-level tokenizer, imported; and text."""
    began = time.monotonic()
    host.run([sys.executable, MODEL_MAKER, host.work / "hf", "--size", host.size, "--device", host.device])
    host.note("prepare", "made the model", seconds=round(time.monotonic() - began, 2))
    num_bytes = sum(file.stat().st_size for file in (host.work / "hf").glob("*.safetensors"))
    seconds = host.ckptool("import-hf", "-q", host.work / "hf", host.base)
    host.note("prepare", "import-hf", gigabytes=num_bytes / 1e9, seconds=seconds)
    shutil.rmtree(host.work / "hf")
    (host.work / "text").mkdir()
    num_tokens = (20 * NUM_SAVES + 4) * host.global_batch_size * host.seq_len * 2
    lines = (f"line {i} of the text says {i * 7919 % 10007}\n" for i in range(num_tokens // 20))
    (host.work / "text" / "text.txt").write_text("".join(lines))


def train_reference(host: Host) -> None:
    """The run without a break: its speed, and where the time of its last two steps went."""
    said = host.train(host.reference, host.num_ranks, profile=f"{NUM_STEPS - 1}:2")
    note_speed(host, "reference", f"{host.num_ranks} ranks, FSDP2", host.reference)
    for line in said.splitlines():
        if line.startswith("profile: ") or "of the communication" in line:
            host.note("reference", "profile of rank 0", line=line.removeprefix("profile: "))
    for step in (2 * SAVE_EVERY, NUM_STEPS):  # the others begin at the first; disks are small next to checkpoints
        shutil.rmtree(host.reference / f"step-{step}")


def save_beside_training(host: Host) -> None:
    """A save every 20 steps, as `--async-save` does it: what it costs the training, and when it is durable.

    `seconds_lost` adds up 20 steps' differences from the usual one, so it also has what a GPU's clock does meanwhile:
    next to it is its standard deviation if the steps between saves varied by chance alone.
    """
    root, between = host.work / "saves", 20
    host.train(root, host.num_ranks, between * NUM_SAVES + 2, save_every=between)
    lines = read_lines(root / "metrics.jsonl")
    seconds = [line["step_seconds"] for line in lines]
    usual = statistics.median(seconds[WARMUP_STEPS:])
    # The second half of each stretch, when the save before it is durable.
    quiet = [x for step, x in enumerate(seconds, start=1) if step > between and step % between > between // 2]
    deviation = statistics.stdev(quiet) * between**0.5
    for number in range(1, NUM_SAVES + 1):
        at = between * number
        # The step of the save waits for the snapshot; the steps after it may be slower until it is durable.
        slower = sum(x - usual for x in seconds[at : at + between])
        durable = [line["checkpoint_seconds"] for line in lines[at - 1 : at + between] if line["checkpoint_seconds"]]
        host.note(
            "saves",
            f"save {number} of {NUM_SAVES}",
            seconds_lost=round(lines[at - 1]["checkpoint_stall_seconds"] + slower, 3),
            standard_deviation=round(deviation, 3),
            seconds_until_durable=durable[:1],
            seconds_of_a_step=round(usual, 3),
        )
    kept = max(root.glob("step-*"), key=lambda path: path.stat().st_mtime)
    host.note("saves", "a checkpoint", gigabytes=folder_bytes(kept) / 1e9)
    shutil.rmtree(root)


def train_on_one(host: Host) -> None:
    """One rank with the same sequence a step, to compare the speed with."""
    root = host.work / "one"
    host.train(root, 1, 8, global_batch_size=1, save_every=0)
    note_speed(host, "one", "1 rank", root)
    shutil.rmtree(root)


def kill_in_save(host: Host) -> None:
    """A rank is killed in the save of step 8; the rest of the run goes on from step 4."""
    root, step = host.work / "killed", 2 * SAVE_EVERY
    saves = [line["checkpoint_seconds"] for line in read_lines(host.reference / "metrics.jsonl")]
    delay = statistics.median([seconds for seconds in saves if seconds]) / 2
    program = [PROGRAMS, "dies-in-save", step, delay, *host.options(root, NUM_STEPS)]
    host.run([*host.torchrun(host.num_ranks), *program], must_fail=True)
    left = [path.name for path in root.glob("step-*") if (path / ".metadata").exists()]
    host.note("kill", f"killed {delay:.2f} s into the save of step {step}", complete=sorted(left))
    host.train(root, host.num_ranks)
    compare(host, "kill", f"resumed on {host.num_ranks} ranks", root)
    shutil.rmtree(root)


def resume_on_half(host: Host) -> None:
    """Steps 5 to 8 on half of the ranks, and 9 to 12 on all of them again."""
    root, half = host.work / "half", max(1, host.num_ranks // 2)
    begin = host.reference / f"step-{SAVE_EVERY}"
    host.train(root, half, 2 * SAVE_EVERY, resume=begin)
    compare(host, "half", f"resumed on {half} ranks", root)
    host.train(root, host.num_ranks)
    compare(host, "half", f"then on {host.num_ranks}", root)
    shutil.rmtree(root)


def resume_resharded(host: Host) -> None:
    """The checkpoint resharded for half of the ranks, and trained there as far as step 6."""
    half = max(1, host.num_ranks // 2)
    root, target = host.work / "resharded", host.work / f"resharded-{half}"
    source = host.reference / f"step-{SAVE_EVERY}"
    host.ckptool("reshard", "-q", source, target, "--world-size", half, "--rewrite")
    host.train(root, half, SAVE_EVERY + 2, resume=target, save_every=0)
    compare(host, "reshard", f"resumed on {half} ranks after reshard", root)
    shutil.rmtree(target)
    shutil.rmtree(root)


def load_with_each_reader(host: Host) -> None:
    """All ranks load a checkpoint: as imported, as they saved it, as more ranks would, and that resharded for them."""
    saved, other, resharded = saved_by_reference(host), host.work / "other", host.work / "to-these"
    host.ckptool("reshard", "-q", saved, other, "--world-size", host.num_ranks + 1, "--rewrite")
    host.ckptool("reshard", "-q", other, resharded, "--world-size", host.num_ranks, "--rewrite")
    places = {
        str(saved): "saved by these ranks",
        str(other): f"saved by {host.num_ranks + 1} ranks",
        str(resharded): f"that, resharded to {host.num_ranks}",
        str(host.base): "imported",
    }
    results = host.work / "loads.jsonl"
    results.touch()
    try:
        host.run([*host.torchrun(host.num_ranks), PROGRAMS, "load", results, host.device, *places])
    finally:
        for found in read_lines(results):
            factor = sum(found["read_bytes_by_rank"]) / sum(found["held_bytes_by_rank"])
            what = f"{places[found.pop('checkpoint')]}, {found.pop('reader')} reader"
            host.note("load", what, read_by_held=round(factor, 3), **found)
    shutil.rmtree(other)
    shutil.rmtree(resharded)


def train_on_meshes(host: Host) -> None:
    """The first steps with copies of the shards, and with split layers."""
    meshes = [{"dp_replicate": 2}] if host.num_ranks % 2 == 0 else []
    meshes += [{"tp": 2}] if host.num_ranks % 2 == 0 else []
    for mesh in meshes:
        name = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
        root = host.work / name.replace(" ", "")
        try:
            host.train(root, host.num_ranks, SAVE_EVERY, **mesh)
            note_speed(host, "meshes", name, root)
            compare(host, "meshes", name, root)
            plain = host.work / "plain"
            host.ckptool("reshard", "-q", root / f"step-{SAVE_EVERY}", plain, "--world-size", host.num_ranks)
            host.train(root, host.num_ranks, SAVE_EVERY + 2, resume=plain, save_every=0)
            compare(host, "meshes", f"{name}, then resharded to plain FSDP2", root)
            shutil.rmtree(plain)
        except RuntimeError as error:  # the other mesh may work
            host.note("meshes", name, error=str(error))
        shutil.rmtree(root, ignore_errors=True)


def share_conversions(host: Host) -> None:
    """reshard and export by one process and by torchrun's ranks, start-up included."""
    source = saved_by_reference(host)
    num_bytes = folder_bytes(source)
    for num_ranks in sorted({1, 2, 4, host.num_ranks}):
        jobs = {
            "reshard": ["reshard", "-q", source, host.work / "new", "--world-size", 2 * host.num_ranks, "--rewrite"],
            "export": ["export", "-q", source, "--out", host.work / "new"],
        }
        for verb, arguments in jobs.items():
            seconds = host.ckptool(*arguments, num_ranks=num_ranks)
            shutil.rmtree(host.work / "new")
            host.note("scaling", f"{verb} by {num_ranks}", gigabytes_stored=num_bytes / 1e9, seconds=seconds)


def saved_by_reference(host: Host) -> Path:
    """The first checkpoint of the run without a break, which is begun if it wasn't."""
    saved = host.reference / f"step-{SAVE_EVERY}"
    if not saved.exists():
        host.train(host.reference, host.num_ranks, SAVE_EVERY)
    return saved


def note_speed(host: Host, section: str, what: str, root: Path) -> None:
    """Tokens a second and GPU, the median of the steps after the first ones."""
    lines = read_lines(root / "metrics.jsonl")[WARMUP_STEPS:]
    speed = statistics.median(line["tokens_per_second"] / line["world_size"] for line in lines)
    memory = max(line["max_memory_bytes"] for line in lines)
    host.note(section, what, tokens_per_second_per_rank=round(speed, 1), max_memory_gigabytes=round(memory / 1e9, 2))


def compare(host: Host, section: str, what: str, root: Path) -> None:
    """The steps that a run trained, next to the same ones of the run without a break: samples, and losses."""
    ours, theirs = samples(root), samples(host.reference)
    losses, expected = by_step(root / "metrics.jsonl", "loss"), by_step(host.reference / "metrics.jsonl", "loss")
    differences = [abs(losses[step] - expected[step]) / abs(expected[step]) for step in losses]
    host.note(
        section,
        what,
        steps=f"{min(ours)} to {max(ours)}",
        same_samples=all(units == theirs[step] for step, units in ours.items()),
        largest_relative_loss_difference=float(f"{max(differences):.2e}"),
    )


def samples(root: Path) -> dict[int, list[int]]:
    """The units of every step; of a step that was trained twice, the last time."""
    return by_step(root / "samples.jsonl", "units")


def by_step(path: Path, key: str) -> dict[int, Any]:
    return {line["step"]: line[key] for line in read_lines(path)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write(host: Host, results: Path, kept: set[str], seconds: float) -> None:
    """The raw rows, and a table of them; those of `kept` sections as they were written before."""
    import torch

    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"multi-{host.device}{host.num_ranks}-{host.size}"
    before = read_lines(stem.with_suffix(".jsonl")) if stem.with_suffix(".jsonl").exists() else []
    old = [row for row in before if row["section"] in kept]
    rows, kept = host.rows + old, {row["section"] for row in old}
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = torch.cuda.get_device_name() if host.device == "cuda" else "CPU"
    lines = [
        f"{host.num_ranks} x {name}, torch {torch.__version__}, Llama of size {host.size}, weights in "
        f"{PARAM_DTYPES[host.size]}, sequences of {host.seq_len}, {seconds:.0f} s in all"
        + (f"; {', '.join(sorted(kept))}: of another run" if kept else ""),
        "",
        "| section | what | found |",
        "|---|---|---|",
    ]
    for row in rows:
        found = {k: round(v, 3) if isinstance(v, float) and v > 1e-2 else v for k, v in row.items()}
        text = "; ".join(f"{k} {v}" for k, v in found.items() if k not in ("section", "what"))
        lines.append(f"| {row['section']} | {row['what']} | {' '.join(text.split()).replace('|', '/')} |")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


@click.command()
@click.option("--ranks", type=click.IntRange(1), help="Ranks (default: the GPUs there are, 2 on a CPU).")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--only", help="Sections, with commas between them (default: all).", default="")
@click.option("--seconds", type=float, default=460, show_default=True, help="When they are over nothing is begun.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Folder for the table and the rows.")
def main(
    ranks: int | None,
    device: str,
    size: str,
    only: str,
    seconds: float,
    work: Path | None,
    results: Path,
) -> None:
    """Run all sections and write what they found."""
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() if device == "cuda" else 2
    began = time.monotonic()
    chosen = only.split(",") if only else list(main_sections())
    with tempfile.TemporaryDirectory(dir=work, prefix="multi-") as name:
        host = Host(Path(name), device, size, ranks, began + seconds)
        try:
            prepare(host)
            for section, run in main_sections().items():
                if section in chosen:
                    attempt(host, section, run)
        finally:
            done = {row["section"] for row in host.rows}
            write(host, results, {*main_sections()} - {*chosen} - done, time.monotonic() - began)


def attempt(host: Host, section: str, run: Callable[[Host], None]) -> None:
    """Run a section; whatever goes wrong in it is a row, and the others go on."""
    try:
        run(host)
    except Exception as error:
        host.note(section, "failed", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
