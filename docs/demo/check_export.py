"""Load an exported folder with transformers, compare each tensor with the checkpoint, write a few words with it.

Usage: python docs/demo/check_export.py CHECKPOINT FOLDER

Uses only torch and transformers, nothing of ckptool: an independent reader of both. Exits with 1 when anything differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "def read_json(path):\n"
PREFIX = "model."


def main(checkpoint: Path, folder: Path) -> None:
    expected = load_model_tensors(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found = model.state_dict()
    different = [name for name in expected if name not in found or not bit_equal(expected[name], found[name])]
    extra = sorted(set(found) - set(expected) - set(model.all_tied_weights_keys))
    if different or extra:
        sys.exit(f"different from the checkpoint: {different[:5]}; not in the checkpoint: {extra[:5]}")
    print(f"transformers loads it; all {len(expected)} tensors equal the checkpoint's, bit for bit")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    words = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    print(f"and it writes:\n{tokenizer.decode(words[0], skip_special_tokens=True)}")


def load_model_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's part of a checkpoint, by torch's own reader, under the names that the model gives them."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
