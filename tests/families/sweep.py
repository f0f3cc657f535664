"""Every model type of the installed transformers, each by a tiny random model, in a process of its own.

    python -m tests.families.sweep            # all of them: about half an hour on two cores
    python -m tests.families.sweep llama t5   # these only

Types with a vision tower of timm or a loss of scipy need these (and torchvision, for timm) beside transformers.
Writes `sweep.json`, which docs/reference/model-families.md is made of.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

RESULTS = Path(__file__).with_name("sweep.json")

#: What one model may take.
LIMIT_SECONDS = 120
LIMIT_BYTES = 12 << 30


def main(names: list[str]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    import transformers

    import tests.families.roundtrip  # noqa: F401  so that each process has what is slow to import

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() and names else {"results": {}}
    record["transformers"] = transformers.__version__
    for name, (result, detail) in in_processes(names or sorted(transformers.CONFIG_MAPPING)):
        print(f"{name}: {result}: {detail}", flush=True)
        record["results"][name] = [result, detail]
        RESULTS.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")


def in_processes(model_types: Iterable[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each type as it is done, one a core at a time, with ("works", what fired), ("refused" or "not tried", why),
    ("no model", "") or ("fails", how). Forked by the only thread: another's locks would stay locked in the child."""
    running: dict[int, tuple[str, int]] = {}
    for model_type in model_types:
        if len(running) == os.cpu_count():
            yield _ended(running)
        pid, reading = _begun(model_type)
        running[pid] = model_type, reading
    while running:
        yield _ended(running)


def _begun(model_type: str) -> tuple[int, int]:
    """The id of a process that tries it, and the file that it writes the result to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.write(writing, json.dumps(_limited(model_type)).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    return pid, reading


def _ended(running: dict[int, tuple[str, int]]) -> tuple[str, tuple[str, str]]:
    """The type of the next process that ends, and its result, which is less than a pipe holds."""
    pid, status = os.wait()
    model_type, reading = running.pop(pid)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    return model_type, tuple(json.loads(said)) if said else ("fails", f"ended with status {status}")


def _limited(model_type: str) -> tuple[str, str]:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(LIMIT_SECONDS)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return attempt(model_type, Path(folder))


def attempt(model_type: str, folder: Path) -> tuple[str, str]:
    """The result of one type, as `in_processes` gives it, in this process."""
    import torch

    from ckptool.errors import CkptoolError
    from tests.families.roundtrip import roundtrip
    from tests.families.tiny import build, model_class

    try:
        if model_class(model_type) is None:
            return "no model", ""
        model = build(model_type)
        model.save_pretrained(folder)
        if model_type == "qwen2_5_omni":
            torch.save({}, folder / "spk_dict.pt")  # voices, which its class asks for and doesn't save
        model = type(model).from_pretrained(str(folder), dtype="auto")
    except Exception as error:
        return "not tried", _without(folder, error)
    try:
        return "works", roundtrip(model, folder)
    except CkptoolError as error:
        return "refused", _without(folder, error)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {_without(folder, error)}"


def _without(folder: Path, error: Exception) -> str:
    """What an error says, without the name of a folder that is gone by then."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2])[:200].replace(f"{folder}: ", "").replace(str(folder), "the model")
    return said or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
