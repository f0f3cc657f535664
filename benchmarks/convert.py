"""Import and export next to `cp` and next to what people do today: same input, same run, in turns.

    python benchmarks/convert.py compare --gigabytes 3 --rounds 5

Writes a table to benchmarks/results/convert-{gigabytes}gb.md and the raw rows beside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from measure import in_turns, machine, table, write_rows

RESULTS = Path(__file__).parent / "results"
NUM_FILES = 6

#: What an import needs of the libraries to know a model's names.
TRANSFORMERS = "import torch, transformers.core_model_loading; from transformers import LlamaForCausalLM"


def make_model(folder: Path, num_bytes: int) -> None:
    """A bf16 Llama-shaped folder of about `num_bytes`, in NUM_FILES shards, written layer by layer."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4
    )
    with torch.device("meta"):
        per_layer = sum(
            p.numel() * 2 for p in transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, 0).parameters()
        )
    config.num_hidden_layers = max(NUM_FILES, round((num_bytes - 2 * 2 * 32000 * 2048) / per_layer))
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = list(model.state_dict())
    weight_map = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        part = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        tensors = {n: torch.empty(model.state_dict()[n].shape, dtype=torch.bfloat16).normal_() for n in part}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def import_through_from_pretrained(source: str, target: str) -> None:
    import torch.distributed.checkpoint as dcp
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    dcp.save({"model": model.state_dict()}, checkpoint_id=target, no_dist=True)


def import_through_hf_reader(source: str, target: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(source)
    entries = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.save({"model": state}, checkpoint_id=target, no_dist=True)


def export_through_torch_save(source: str, target: str) -> None:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    Path(target).mkdir()
    dcp_to_torch_save(source, f"{target}/all.pt")
    state = torch.load(f"{target}/all.pt", weights_only=True, mmap=True)["model"]
    save_file(state, f"{target}/model.safetensors", {"format": "pt"})
    Path(target, "all.pt").unlink()


def export_through_hf_writer(source: str, target: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    entries = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {
        "model": {
            n.removeprefix("model."): torch.empty(e.size, dtype=e.properties.dtype)
            for n, e in entries.items()
            if n.startswith("model.")
        }
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    index = dict.fromkeys(state["model"], 1)
    writer = HuggingFaceStorageWriter(target, fqn_to_index_mapping=index, enable_consolidation=True)
    dcp.save(state["model"], storage_writer=writer, no_dist=True)


PEERS = {
    "from_pretrained + dcp.save": import_through_from_pretrained,
    "HuggingFaceStorageReader + dcp.load + dcp.save": import_through_hf_reader,
    "dcp_to_torch_save + safetensors": export_through_torch_save,
    "dcp.load + HuggingFaceStorageWriter, consolidated": export_through_hf_writer,
}


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("name", type=click.Choice(list(PEERS)))
@click.argument("source")
@click.argument("target")
def peer(name: str, source: str, target: str) -> None:
    """Run one peer (the benchmark calls this in a process of its own)."""
    PEERS[name](source, target)
    subprocess.run(["sync", "-f", target], check=True)


@main.command()
@click.option("--gigabytes", default=3.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
@click.option("--only", multiple=True, help="Only these rows.")
def compare(gigabytes: float, rounds: int, work: Path | None, only: tuple[str, ...]) -> None:
    """Measure everything and write the table."""
    with tempfile.TemporaryDirectory(dir=work, prefix="convert-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "make", str(folder / "hf"), str(gigabytes)], check=True)
        subprocess.run([sys.executable, "-m", "ckptool", "import-hf", "-q", folder / "hf", folder / "dcp"], check=True)
        peer_command = [sys.executable, __file__, "peer"]
        hf, dcp, out = str(folder / "hf"), str(folder / "dcp"), str(folder / "out")
        ours = [sys.executable, "-m", "ckptool"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands = {
            "cp + sync": ["sh", "-c", f"cp -r {hf} {out} && sync -f {out}"],
            "import torch.distributed.checkpoint": [sys.executable, "-c", "import torch.distributed.checkpoint"],
            "import torch and transformers": [sys.executable, "-c", TRANSFORMERS],
            "ckptool import-hf": [*ours, "import-hf", "-q", hf, out],
            "ckptool import-hf --dtype fp16": [*ours, "import-hf", "-q", "--dtype", "fp16", hf, out],
            "ckptool import-hf, 2 ranks": [*torchrun, "-m", "ckptool", "import-hf", "-q", hf, out],
            "ckptool export": [*ours, "export", "-q", dcp, "--out", out],
        }
        for peer_name, function in PEERS.items():
            source = hf if function.__name__.startswith("import") else dcp
            commands[peer_name] = [*peer_command, peer_name, source, out]
        if only:
            commands = {n: c for n, c in commands.items() if n in (*only, "cp + sync")}
        rows = in_turns(commands, rounds, before=lambda name: shutil.rmtree(out, ignore_errors=True))
    text = f"{gigabytes:g} GB, {rounds} rounds, {machine()}\n\n{table(rows, 'cp + sync')}\n"
    print(text)
    stem = f"convert-{gigabytes:g}gb"
    write_rows(RESULTS / f"{stem}.jsonl", rows)
    (RESULTS / f"{stem}.md").write_text(text)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("gigabytes", type=float)
def make(folder: Path, gigabytes: float) -> None:
    """Make the model folder."""
    folder.mkdir(parents=True)
    make_model(folder, int(gigabytes * 1e9))


if __name__ == "__main__":
    main()
