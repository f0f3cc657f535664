"""What a checkpoint costs the training on one GPU: torch's dcp.save and dcp.async_save, and ckptool's AsyncSaver.

    python benchmarks/gpu/save.py                     # all rows, under 9 minutes on one H200
    python benchmarks/gpu/save.py --only "8b ours"    # rows whose text holds these words
    python benchmarks/gpu/save.py --device cpu        # does every row run at all? on a tiny state, no figures

Each row is a process of its own and is written as soon as it is done. The trainer's step (benchmarks/gpu/step.py: Llama
of the 8B and the 1B shape, weights and AdamW states in bf16) runs all the time. For each of a row's saves, to a name
that is free: `lost` is the time of the steps from the call until the checkpoint is durable, and of one step more, less
what so many steps take without a save (the mean of 6 right before); `durable` is the time from the call until the files
are complete (ours: flushed and renamed too). The first save of a process and the later ones are listed apart.

A virtual machine may be given its memory only when that is touched for the first time, 3 s for 8 GiB on the one where
this was measured. So `--touch-gib` of memory is written to and given back before the first row.

Rows of `load` save once and load that state again, `num_saves` times with ckptool.load (which compares digests), then
with torch's dcp.load and each reader.

Rows of `raw` are the disk alone: as many bytes by 8 threads past the page cache, flushed, with nothing on the GPU.

Rows of `snapshot` time nothing: while the compute stream is busy and has updates queued before and after the save, the
stored tensors must equal copies that the compute stream itself made at that moment.
Writes benchmarks/results/save.jsonl and save.md.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

TOP = Path(__file__).parents[2]
sys.path[:0] = [str(TOP), str(Path(__file__).parent)]
RESULTS = TOP / "benchmarks" / "results"
SEQUENCES = {"8b": 2, "1b": 4}
ROW_SECONDS = 150
BUDGET_SECONDS = 530

#: (shape, method, where, number of saves), the most important first. `ours-host`: as if no copy fitted on the GPU.
ROWS = [
    ("1b", "snapshot", "shm", 2),
    ("1b", "ours", "shm", 3),
    ("8b", "ours", "shm", 3),
    ("1b", "dcp.save", "shm", 2),
    ("1b", "dcp.async_save", "shm", 2),
    ("8b", "ours", "disk", 1),
    ("8b", "raw", "disk", 1),
    ("8b", "load", "shm", 2),
    ("8b", "dcp.async_save", "shm", 1),
    ("8b", "dcp.save", "shm", 1),
    ("1b", "ours-host", "shm", 3),
    ("1b", "ours", "disk", 2),
    ("1b", "raw", "disk", 2),
]
_SCALED = (("state_bytes", 1e9), ("step_seconds", 1))
_FIELDS = ("shape", "method", "where", "num_saves")


@click.group(invoke_without_command=True)
@click.option("--only", default="", help="Only rows whose text holds these words.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--disk", type=click.Path(path_type=Path), default=tempfile.gettempdir(), help="A folder on a disk.")
@click.option("--touch-gib", type=click.IntRange(0), default=0, help="Memory to touch first, in GiB.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
@click.pass_context
def main(context: click.Context, only: str, device: str, disk: Path, touch_gib: int, results: Path) -> None:
    """Measure every row, each in a process of its own."""
    if context.invoked_subcommand:
        return
    began = time.monotonic()
    touch_memory(touch_gib)
    results.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    for values in ROWS:
        if not all(word in [str(value) for value in values] for word in only.split()):
            continue
        row = dict(zip(_FIELDS, values, strict=True))
        left = BUDGET_SECONDS - (time.monotonic() - began)
        folder = Path(tempfile.mkdtemp(prefix="save-", dir="/dev/shm" if row["where"] == "shm" else disk))
        try:
            row |= _in_process(row, device, folder, min(ROW_SECONDS, left)) if left > 30 else {"error": "no time left"}
        finally:
            shutil.rmtree(folder)
        done.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        (results / "save.jsonl").write_text("".join(json.dumps(line) + "\n" for line in done))
        (results / "save.md").write_text(table(done))
    print(table(done))


def touch_memory(num_gib: int) -> None:
    """Write so much to /dev/shm from several threads, and remove it."""
    zeros = bytes(1 << 26)
    with tempfile.TemporaryDirectory(prefix="touch-", dir="/dev/shm") as name, ThreadPoolExecutor(16) as threads:

        def write(number: int) -> None:
            with (Path(name) / str(number)).open("wb", buffering=0) as file:
                for _ in range(16):
                    file.write(zeros)

        list(threads.map(write, range(num_gib)))


def _in_process(row: dict[str, Any], device: str, folder: Path, limit_seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "row", device, str(folder), json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        return _partial(error.stdout) | {"error": f"not done after {limit_seconds:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # The last lines may be warnings of libraries that end.
        return _partial(done.stdout) | {"error": next((x for x in reversed(lines) if "Error" in x), lines[-1])}
    return _partial(done.stdout)


def _partial(output: str | bytes | None) -> dict[str, Any]:
    """What a row has said so far: each save adds a line that holds all before it."""
    text = output.decode() if isinstance(output, bytes) else output or ""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        next((row["machine"] for row in rows if "machine" in row), ""),
        "",
        "| state | GB | method | to | step s | lost s, first | later | durable after s, first | later | host GiB | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lost, durable = ([f"{value:.2f}" for value in row.get(key, [])] for key in ("lost_seconds", "durable_seconds"))
        size, step = (f"{row[key] / unit:.3f}" if key in row else "" for key, unit in _SCALED)
        cells = [row["shape"], size, row["method"], row["where"], step]
        cells += [" ".join(part) for part in (lost[:1], lost[1:], durable[:1], durable[1:])]
        cells += [f"{row.get('host_bytes', 0) / 2**30:.1f}", row.get("error", row.get("note", ""))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@main.command()
@click.argument("device")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("text")
def row(device: str, folder: Path, text: str) -> None:
    """Measure one row in this process, and print it as JSON after each save."""
    import step as steps
    import torch

    warnings.filterwarnings("ignore")
    given = json.loads(text)
    setting = {"sequences": SEQUENCES[given["shape"]], "checkpointing": "block", "compile": False, "loss": "chunked"}
    setting["shape"] = given["shape"] if device == "cuda" else "tiny"
    if given["method"] == "raw":
        num_bytes = 6 * num_parameters(str(setting["shape"]))
        seconds = [write_raw(folder, num_bytes) for _ in range(given["num_saves"])]
        print(json.dumps({"durable_seconds": seconds, "state_bytes": num_bytes, "machine": _machine(device)}))
        return
    pending: list[Any] = []

    def before_update() -> None:
        if pending and given["method"].startswith("ours"):
            pending[-1].wait_until_copied()

    step, state = steps.trainer_state(setting, device, 4096 if device == "cuda" else 32, before_update)
    step()
    if given["method"] == "snapshot":
        print(json.dumps(check_snapshots(state, folder, device)), flush=True)
        return
    if given["method"] == "load":
        print(json.dumps(loads(state, folder, given["num_saves"]) | {"machine": _machine(device)}), flush=True)
        return
    save = method_of(given["method"])
    found: dict[str, Any] = {"lost_seconds": [], "durable_seconds": [], "machine": _machine(device)}
    found["state_bytes"] = sum(t.nbytes for t in _tensors(state.state_dict()))
    step()
    for number in range(given["num_saves"]):
        usual = _seconds(step, 6 if device == "cuda" else 2)
        found["step_seconds"] = round(usual, 4)
        target = folder / f"save-{number}"
        began = time.perf_counter()
        pending.append(save(state.state_dict(), target))
        num_steps = 0
        durable = time.perf_counter() if pending[-1].done() else None
        while durable is None:
            step()
            num_steps += 1
            durable = time.perf_counter() if pending[-1].done() else None
        step()
        lost = time.perf_counter() - began - (num_steps + 1) * usual
        pending[-1].result()
        exact = getattr(pending[-1], "durable_seconds", None)
        found["lost_seconds"].append(round(lost, 3))
        found["durable_seconds"].append(round(exact or durable - began, 3))
        found["host_bytes"] = getattr(save, "host_bytes", lambda: 0)()
        print(json.dumps(found), flush=True)
        shutil.rmtree(target)
    if device == "cuda":
        torch.cuda.synchronize()
    getattr(save, "close", lambda: None)()


class Ours:
    """ckptool's AsyncSaver, used as the trainer does."""

    def __init__(self, on_gpu: bool | None) -> None:
        from ckptool import AsyncSaver

        self._saver = AsyncSaver()
        self._saver._clones_fit = on_gpu

    def __call__(self, state: dict[str, Any], target: Path) -> Any:
        return self._saver.save(state, target, wait_for_copy=False)

    def host_bytes(self) -> int:
        return self._saver.host_bytes

    def close(self) -> None:
        self._saver.close()


class Done:
    """A save that is done when its call returns."""

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return


def num_parameters(shape: str) -> int:
    """Of the shape's model, tied ones once."""
    import step as steps
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**steps.SHAPES[shape])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def write_raw(folder: Path, num_bytes: int, num_threads: int = 8) -> float:
    """Seconds that it takes to write so many bytes to new files, past the page cache, and to flush them."""
    part = mmap.mmap(-1, 1 << 22)  # aligned to a page, as O_DIRECT demands
    part.write(os.urandom(len(part)))

    def write(number: int) -> None:
        file = os.open(folder / f"raw-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        for _ in range(max(1, num_bytes // num_threads // len(part))):
            os.write(file, part)
        os.fsync(file)
        os.close(file)

    began = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(write, range(num_threads)))
    seconds = time.perf_counter() - began
    for number in range(num_threads):
        (folder / f"raw-{number}").unlink()
    return seconds


def method_of(name: str) -> Any:
    """A function that begins a save; what it returns knows `done()` and `result()`."""
    import torch.distributed.checkpoint as dcp

    if name.startswith("ours"):
        return Ours(on_gpu=False if name == "ours-host" else None)
    if name == "dcp.save":
        return lambda state, target: [dcp.save(state, checkpoint_id=target), Done()][1]
    return lambda state, target: dcp.async_save(state, checkpoint_id=target)


def loads(state: Any, folder: Path, num_loads: int) -> dict[str, Any]:
    """Seconds of loads of the state that was just saved."""
    import torch.distributed.checkpoint as dcp

    import ckptool

    save = method_of("ours")
    save(state.state_dict(), folder / "saved").result()
    save.close()
    held = {name: state.state_dict()[name] for name in ("model", "optim")}
    ways: dict[str, list[Callable[[], None]]] = {
        "ckptool.load": [lambda: ckptool.load(held, folder / "saved")] * num_loads,
        "dcp.load, ckptool.StorageReader": [
            lambda: dcp.load(held, storage_reader=ckptool.StorageReader(folder / "saved"))
        ],
        "dcp.load": [lambda: dcp.load(held, checkpoint_id=folder / "saved")],
    }
    found = {}
    for name, calls in ways.items():
        found[name] = [round(_seconds(call, 1), 3) for call in calls]
        print(name, found[name], file=sys.stderr, flush=True)
    note = "; ".join(f"{name} {' '.join(map(str, seconds))}" for name, seconds in found.items())
    return {"load_seconds": found, "note": note, "state_bytes": sum(t.nbytes for t in _tensors(held))}


def check_snapshots(state: Any, folder: Path, device: str) -> dict[str, Any]:
    """Saves between updates that are queued and not done; what is stored must be what the stream itself copied."""
    import torch

    import ckptool

    held = _tensors(state.state_dict())
    work = torch.randn(8192, 8192, device=device) if device == "cuda" else torch.randn(64, 64)
    note = []
    for on_gpu in [True, False] if device == "cuda" else [None]:
        saver = ckptool.AsyncSaver()
        saver._clones_fit = on_gpu
        for number in range(2):
            for _ in range(50):
                work = (work @ work).clamp(-1, 1)
            for tensor in held:
                tensor.add_(1 + number)
            copies = [tensor.clone() for tensor in held]
            target = folder / f"snapshot-{on_gpu}-{number}"
            pending = saver.save(state.state_dict(), target)
            for tensor in held:
                tensor.mul_(-3)
            pending.result()
            stored = state.state_dict()
            ckptool.load({name: stored[name] for name in ("model", "optim")}, target)
            wrong = sum(not torch.equal(one, other) for one, other in zip(held, copies, strict=True))
            if wrong:
                raise click.ClickException(f"{wrong} of {len(held)} tensors are not those of the snapshot")
            shutil.rmtree(target)
        note.append(f"{len(held)} tensors equal, twice, {'cloned on the GPU' if on_gpu else 'in host memory'}")
        saver.close()
    return {"note": "; ".join(note), "machine": _machine(device)}


def _tensors(state: dict[str, Any]) -> list[Any]:
    """This rank's tensors of the model and the optimizer, sharing memory with them."""
    tensors = [*state["model"].values(), *(t for of_one in state["optim"]["state"].values() for t in of_one.values())]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _seconds(step: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def _machine(device: str) -> str:
    import torch

    return f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
