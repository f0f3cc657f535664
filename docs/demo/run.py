"""The main job on a real model, as a story: import, train, die, resume on other world sizes, export, check.

Usage: python docs/demo/run.py        (or `make demo`)

Everything is written to ./demo-run. Every command is printed before it runs, just as you would type it there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
from lineage import by_world_size, faults, read_lines, surviving

HERE = Path(__file__).resolve().parent
RUN = Path.cwd() / "demo-run"
MARKER = RUN / ".ckptool-demo"
ROOT = RUN / "ckpt"
MODEL = "SmolLM2-135M-Instruct"

SAVE_EVERY, KILLED_AFTER, STEPS_ON_THREE, STEPS = 3, 5, 6, 8
TEXT_BYTES = 1_000_000
KILL_LIMIT_SECONDS = 180
TRAINER = shlex.split(
    f"-m trainer --init-from {MODEL} --data text --seq-len 32 --global-batch-size 6 --micro-batch-size 3 "
    f"--lr 1e-5 --schedule constant --save-every {SAVE_EVERY} --log-every 1 --log-samples"
)


class DemoError(Exception):
    """A step failed, or a check found something wrong."""


def main() -> int:
    start = time.monotonic()
    memory = MemoryWatch()
    try:
        make_run_folder()
        story()
    except DemoError as error:
        print(f"\nThe demo failed: {error}\nIts files are in {RUN}.", file=sys.stderr)
        return 1
    print(f"\nAll checks passed, in {time.monotonic() - start:.0f} s.", end=" ")
    print(f"Most memory in use at once, over all processes: {memory.stop() / 1e9:.1f} GB.")
    what_next()
    return 0


def story() -> None:
    tell("1. A pretrained model: SmolLM2-135M, from a package that carries it, as a Hugging Face folder.")
    run("python", HERE / "build_model.py", MODEL)
    num_files = copy_training_text()
    print(f"Training text: {num_files} files of Python's own standard library, in {RUN / 'text'}")

    tell("2. Turn it into a distributed checkpoint. It is streamed: the model is never in memory as a whole.")
    run("ckptool", "import-hf", MODEL)

    tell(f"3. Train on 2 ranks with FSDP2, saving every {SAVE_EVERY} steps. After step {KILLED_AFTER}: kill -9.")
    train_and_kill(ranks=2)
    run("ckptool", "ls")
    check(newest_complete() == f"step-{SAVE_EVERY}", f"the newest complete checkpoint is step-{SAVE_EVERY}")

    tell("4. The same command on 3 ranks. It finds the newest complete checkpoint and goes on from there.")
    run("torchrun", "--nproc-per-node", 3, *TRAINER, "--steps", STEPS_ON_THREE, threads=1)

    tell("5. And on a single process, without torchrun.")
    run("python", *TRAINER, "--steps", STEPS, threads=os.cpu_count() or 1)
    run("ckptool", "ls")

    tell("6. Give the result to the Hugging Face world.")
    run("ckptool", "export", f"step-{STEPS}", "--to", "hf", "--out", "exported")

    tell("7. A fresh process without ckptool: torch reads the checkpoint, transformers the export. Are they equal?")
    run("python", HERE / "check_export.py", ROOT / f"step-{STEPS}", "exported")

    tell("8. Was each piece of text trained exactly once, in spite of the kill and the changes of world size?")
    prove_exactly_once()


def make_run_folder() -> None:
    """A fresh ./demo-run; an old one is removed only when it is the demo's own."""
    if RUN.exists():
        if not MARKER.exists():
            raise DemoError(f"{RUN} exists and was not made by the demo; move it away")
        shutil.rmtree(RUN)
    RUN.mkdir()
    MARKER.touch()


def copy_training_text() -> int:
    """Copy modules of the standard library, in alphabetical order, until there is enough text."""
    target = RUN / "text"
    target.mkdir()
    copied = num_bytes = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        shutil.copyfile(path, target / path.name)
        copied, num_bytes = copied + 1, num_bytes + path.stat().st_size
        if num_bytes >= TEXT_BYTES:
            break
    return copied


def train_and_kill(ranks: int) -> None:
    """Start the training and kill its whole process tree, without warning, once step KILLED_AFTER is logged."""
    process = start("torchrun", "--nproc-per-node", ranks, *TRAINER, "--steps", STEPS, threads=1)
    deadline = time.monotonic() + KILL_LIMIT_SECONDS
    try:
        while last_step() < KILLED_AFTER:
            if process.poll() is not None:
                raise DemoError(f"the training ended by itself, with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise DemoError(f"step {KILLED_AFTER} was not reached in {KILL_LIMIT_SECONDS} s")
            time.sleep(0.05)
    finally:
        kill_tree(process)
    print(f"killed after step {last_step()}; the last save was at step {SAVE_EVERY}")


def last_step() -> int:
    return max((record["step"] for record in read_lines(ROOT / "metrics.jsonl")), default=0)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and all its descendants; none of them can clean up."""
    try:
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(tree)


def newest_complete() -> str:
    listed = subprocess.run(["ckptool", "ls", "--json"], cwd=RUN, env=environment(1), check=True, capture_output=True)
    complete = [row for row in json.loads(listed.stdout)["checkpoints"] if row["complete"] and row["step"]]
    return max(complete, key=lambda row: row["step"])["name"] if complete else "none"


def prove_exactly_once() -> None:
    consumed = json.loads((ROOT / f"step-{STEPS}" / "data_position.json").read_text())["consumed"]
    samples = read_lines(ROOT / "samples.jsonl")
    lineage = surviving(samples)
    for stretch in by_world_size(surviving(read_lines(ROOT / "metrics.jsonl"))):
        print(f"  {stretch}")
    print(f"  {len(samples) - len(lineage)} steps were lost in the kill and trained again")
    wrong = faults(lineage, consumed)
    check(
        not wrong,
        f"samples.jsonl: units 0 to {consumed - 1}, each trained exactly once" + "".join(f"\n  {w}" for w in wrong),
    )


def what_next() -> None:
    print("""
Your own model, from the Hub, on as many GPUs as you have:

  ckptool import-hf meta-llama/Llama-3.1-8B
  torchrun --nproc-per-node 8 -m trainer --init-from Llama-3.1-8B --data my-text/ --steps 5000
  ckptool ls
  ckptool export step-5000 --to hf

(`source .venv/bin/activate` first.) docs/quickstart.md goes through it.
The files of this demo, 6 GB, are in ./demo-run; `make clean` removes them.""")


def tell(text: str) -> None:
    print(f"\n{text}", flush=True)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise DemoError(f"this does not hold: {text}")
    print(f"  checked: {text}")


def run(*command: object, threads: int = 1) -> None:
    """Print a command, run it in ./demo-run, and fail when it fails."""
    code = start(*command, threads=threads).wait()
    if code:
        raise DemoError(f"{command[0]} exited with {code}")


def start(*command: object, threads: int = 1) -> subprocess.Popen[bytes]:
    words = [os.path.relpath(word, RUN) if isinstance(word, Path) else str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    return subprocess.Popen(words, cwd=RUN, env=environment(threads))


def environment(threads: int) -> dict[str, str]:
    """This environment, with the programs of this interpreter's environment first and less chatter from libraries.

    The malloc setting makes glibc give large freed blocks back to the system: a quarter less memory with FSDP on CPU.
    """
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    settings = {**quiet, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CKPTOOL_")}
    return inherited | settings | {"PATH": path, "OMP_NUM_THREADS": str(threads)}


class MemoryWatch:
    """Samples the memory of this process and its descendants. Shared pages count once (PSS) where the system tells."""

    def __init__(self, interval_seconds: float = 0.5) -> None:
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval_seconds,), daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the sampling; return the peak in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._peak_bytes

    def _watch(self, interval_seconds: float) -> None:
        me = psutil.Process()
        while not self._stopped.wait(interval_seconds):
            tree = [me, *me.children(recursive=True)]
            self._peak_bytes = max(self._peak_bytes, sum(map(memory_bytes, tree)))


def memory_bytes(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(info, "pss", 0) or info.rss


if __name__ == "__main__":
    sys.exit(main())
