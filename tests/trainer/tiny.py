"""A tiny Llama checkpoint, a byte-level tokenizer, a small corpus, and runs over them."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ckptool
from trainer.config import TrainConfig
from trainer.train import train

#: `cuda` runs the tests of the trainer on GPUs, those of several ranks through NCCL.
DEVICE = os.environ.get("TEST_DEVICE", "cpu")

#: No test has more ranks. On GPUs each rank needs one of its own.
MOST_RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 4

NUM_DOCUMENTS = 30
SEQ_LEN = 16


def make_base(folder: Path, tie: bool = True, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Path:
    """A checkpoint as `ckptool import-hf` makes it: model weights only, and an `hf/` folder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes | heads | settings, tie_word_embeddings=tie, bos_token_id=None, eos_token_id=256
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    hf = folder.with_name(f"{folder.name}-hf")
    model.config.save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if tie else {}
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in ties}
    ckptool.save(
        {"model": weights},
        folder,
        provenance=ckptool.Provenance(tool_version=ckptool.__version__, source={"id": "tiny"}, ties=ties),
        ties={f"model.{alias}": f"model.{canonical}" for alias, canonical in ties.items()},
        side_folder=hf,
    )
    return folder


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_data(folder: Path) -> Path:
    """About 110 windows of SEQ_LEN tokens in text files."""
    folder.mkdir()
    for number in range(NUM_DOCUMENTS):
        (folder / f"{number:02}.txt").write_text(f"document {number} says {number * 7919 % 1000} and {'xyz' * 10}\n")
    return folder


def tiny_config(root: Path, **changes: Any) -> TrainConfig:
    """A run of the tiny model: root/base is the checkpoint, root/text the data, both made by the fixture."""
    settings: dict[str, Any] = {
        "init_from": "base",
        "data": (str(root / "text"),),
        "unit": "window",
        "seq_len": SEQ_LEN,
        "global_batch_size": 6,
        "micro_batch_size": 2,
        "steps": 4,
        "lr": 1e-2,
        "warmup_steps": 2,
        "schedule": "cosine",
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "on_nonfinite": "stop",
        "hang_minutes": 10,
        "save_every": 0,
        "save_every_minutes": 0,
        "async_save": False,
        "keep_last": 0,
        "keep_every": 0,
        "root": root,
        "work_dir": root,
        "upload_to": "",
        "upload_mb_per_s": 0,
        "resume": "auto",
        "seed": 0,
        "accept_data_change": "",
        "device": DEVICE,
        "dp_replicate": 1,
        "tp": 1,
        "cpu_offload": False,
        "reshard_after_forward": True,
        "deterministic": DEVICE == "cuda",  # without it, no bit is promised there
        "activation_checkpointing": "none",
        "compile": False,
        "compile_cache": False,
        "fp8": "none",
        "loss": "chunked",
        "log_every": 100,
        "log_to": "none",
        "straggler_factor": 1.5,
        "profile": "",
        "eval_data": (),
        "eval_every": 500,
        "eval_units": 256,
        "param_dtype": "fp32",
        "stochastic_rounding": False,
        "lora_rank": 0,
        "lora_alpha": 0,
        "lora_targets": "all-linear",
        "compute_dtype": "fp32",
        "log_samples": True,
    }
    return TrainConfig(**settings | changes)


def at_most(num_ranks: int) -> int:
    """So many ranks, or as many as there may be."""
    return max(1, min(num_ranks, MOST_RANKS))


def run(root: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train in this process; returns the lines of metrics.jsonl."""
    train(tiny_config(root, **changes))
    return read_lines(root / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def surviving_samples(root: Path) -> list[int]:
    """The units that the newest checkpoint was trained on, in order: for each step, its last attempt."""
    last = {line["step"]: line["units"] for line in read_lines(root / "samples.jsonl")}
    return [unit for step in sorted(last) for unit in last[step]]
