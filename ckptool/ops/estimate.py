"""Whether training fits into GPUs, told from a config.json."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckptool.core.memory import (
    CHECKPOINTING,
    EIGHT_BIT_MOMENT_BYTES,
    MAX_GPUS,
    Memory,
    ModelSizes,
    TrainingSetup,
    ddp_memory,
    fewest_gpus,
    fsdp_memory,
)
from ckptool.core.plan import Result
from ckptool.errors import DamagedError, NotFoundError, StorageError, UnsupportedError, UsageError
from ckptool.formats.dcp_metadata import is_checkpoint
from ckptool.hub import locate_config
from ckptool.runs import default_root, possible_places, resolve
from ckptool.storage.files import Place, os_errors
from ckptool.storage.place import fetched
from ckptool.storage.store import is_url, shown_name

#: How the trainer computes the loss, by its --loss: the logits that are in memory at a time (None: all).
LOSSES = {"chunked": 1 << 28, "plain": None}

#: Bytes of the dtypes that weights, optimizer and computation may have.
DTYPE_BYTES = {"fp32": 4, "bf16": 2}

#: The trainer's --optimizer.
OPTIMIZERS = ("adamw", "adamw8bit")

_SHARDINGS = {"ddp": ddp_memory, "fsdp2": fsdp_memory}

#: A parameter of a block, by the block's name: whatever is in the first numbered list.
_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Ranks:
    """GPUs as the trainer cuts them: `tp` share layers, `dp_replicate` copies of the rest share parameters."""

    num_gpus: int
    dp_replicate: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_gpus % (self.dp_replicate * self.tp):
            raise UsageError(
                f"{self.num_gpus} GPUs can't be cut into --dp-replicate {self.dp_replicate} times --tp {self.tp} parts",
                hint="their product must divide the number of GPUs",
            )

    @property
    def num_shards(self) -> int:
        return self.num_gpus // (self.dp_replicate * self.tp)

    @property
    def num_data_ranks(self) -> int:
        return self.num_gpus // self.tp


def estimate(
    src: str,
    *,
    root: Place | None = None,
    num_gpus: int = 1,
    gpu_bytes: int = 80 * 10**9,
    seq_len: int = 1024,
    micro_batch_size: int = 1,
    global_batch_size: int | None = None,
    dp_replicate: int = 1,
    tp: int = 1,
    param_dtype: str = "fp32",
    optimizer: str = "adamw",
    optimizer_dtype: str | None = None,
    compute_dtype: str = "bf16",
    loss: str = "chunked",
    compiled: bool = False,
    reshard_after_forward: bool = True,
    revision: str | None = None,
) -> Result:
    """Say what each of `num_gpus` GPUs of `gpu_bytes` needs to train the model of `src`: a checkpoint (a path, a name
    under `root`, `latest`), a folder with a config.json, or a Hub id, of which only the config is fetched.

    `seq_len` in tokens, the batch sizes in sequences, a global one over all ranks (default: one micro batch a rank).
    `loss` is a key of LOSSES, `optimizer` one of OPTIMIZERS; dtypes are keys of DTYPE_BYTES, that of AdamW's state by
    default the weights', as the trainer has it; `compiled` is the trainer's --compile, `reshard_after_forward` its
    option of that name. `details` has the model's sizes and `ways`: DDP and FSDP2 with each `checkpointing` of
    core.memory.CHECKPOINTING, each with the fields of `core.memory.Memory`, `needed_bytes`, `fits` and `fewest_gpus`
    (None: no number is enough).
    Raises UsageError, NotFoundError, DamagedError or UnsupportedError, one line each.
    """
    ranks = Ranks(num_gpus, dp_replicate, tp)
    if loss not in LOSSES:
        raise UsageError(f"there is no loss {loss!r}: choose one of {', '.join(LOSSES)}")
    setup = TrainingSetup(
        seq_len,
        micro_batch_size,
        parameter_bytes=_dtype_bytes(param_dtype),
        optimizer_bytes=_moment_bytes(optimizer, optimizer_dtype, param_dtype),
        compute_bytes=_dtype_bytes(compute_dtype),
        loss_chunk_elements=LOSSES[loss] if tp == 1 else None,  # a head that is split has the plain loss
        compiled=compiled,
        reshard_after_forward=reshard_after_forward,
    )
    if min(seq_len, micro_batch_size, gpu_bytes) < 1:
        raise UsageError("the sequence length, the micro batch and the memory of a GPU must be positive")
    if global_batch_size is not None and global_batch_size < ranks.num_data_ranks:
        raise UsageError(
            f"{ranks.num_data_ranks} ranks can't share a global batch of {global_batch_size} sequences",
            hint="raise --global-batch-size, or estimate fewer GPUs",
        )
    folder = _find_config(src, revision, root)
    model, num_parameters = read_sizes(fetched(folder, ["config.json"]), tp)

    def memory(sharding: str, checkpointing: str, at: Ranks) -> Memory:
        units = -(-global_batch_size // at.num_data_ranks) if global_batch_size else micro_batch_size
        num_micro_steps = max(1, -(-units // micro_batch_size))
        here = replace(setup, num_shards=at.num_shards, num_micro_steps=num_micro_steps, alone=at.num_gpus == 1)
        return _SHARDINGS[sharding](model, here, checkpointing)

    ways = []
    for sharding in ("ddp", "fsdp2"):
        for checkpointing in CHECKPOINTING:
            needs = memory(sharding, checkpointing, ranks)

            def fits(count: int, sharding: str = sharding, checkpointing: str = checkpointing) -> bool:
                return memory(sharding, checkpointing, replace(ranks, num_gpus=count)).needed_bytes <= gpu_bytes

            ways.append(
                {
                    "sharding": sharding,
                    "checkpointing": checkpointing,
                    **asdict(needs),
                    "needed_bytes": needs.needed_bytes,
                    "fits": needs.needed_bytes <= gpu_bytes,
                    "fewest_gpus": fewest_gpus(
                        fits, dp_replicate * tp, min(MAX_GPUS, (global_batch_size or MAX_GPUS) * tp)
                    ),
                }
            )
    details: dict[str, Any] = {
        "num_parameters": num_parameters,
        "num_blocks": model.num_blocks,
        "num_gpus": num_gpus,
        "gpu_bytes": gpu_bytes,
        "num_shards": ranks.num_shards,
        "ways": ways,
    }
    return Result("estimate", shown_name(src), details=details)


def _find_config(src: str, revision: str | None, root: Place | None) -> Place:
    """The folder of the config.json; a `revision` is one of the Hub. Raises NotFoundError, or as `locate_config`."""
    if revision is None and not is_url(src):
        with os_errors(src):
            places = possible_places(src, root)
            if found := next((folder for path in places if (folder := _with_config(path)) is not None), None):
                return found
            is_ours = src == "latest" or any(is_checkpoint(path) for path in places)
        if is_ours:
            path = resolve(src, root)
            if found := _with_config(path):
                return found
            raise NotFoundError(f"{path} holds no config.json", hint="name the model's folder, or its Hub id")
    try:
        return locate_config(src, revision)
    except (NotFoundError, StorageError) as error:
        if revision is None and not (is_url(src) or "/" in src):
            error.hint = f"{default_root() if root is None else root} has no checkpoint {src}; {error.hint}"
        raise


def _with_config(path: Place) -> Place | None:
    """The model's folder in what lies at `path`, or itself."""
    return next((folder for folder in (path, path / "hf") if (folder / "config.json").is_file()), None)


def read_sizes(folder: Path, tp: int = 1) -> tuple[ModelSizes, int]:
    """The sizes of the model of `folder`'s config.json on one of `tp` ranks, and the parameters of all of it.

    Raises DamagedError for what is no config, UnsupportedError for a model that is no decoder known to this
    transformers or has no tensor-parallel plan, UsageError when its heads can't be shared evenly.
    """
    from ckptool.core.config_limits import check_config
    from ckptool.naming.meta_model import build_meta_model, is_custom_code
    from ckptool.storage.files import read_json

    location = str(folder / "config.json")
    stored = read_json(folder / "config.json", max_bytes=16 << 20)
    if not isinstance(stored, dict):
        raise DamagedError(f"{location} is not a JSON object")
    check_config(stored, location)
    if is_custom_code(stored):
        raise UnsupportedError(f"{location}: the model is the repository's own code, which is not run")
    model = build_meta_model(folder)
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not getattr(config, "num_attention_heads", None):
        raise UnsupportedError(f"{location}: {type(model).__name__} is no decoder with attention and an output head")
    parameters = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in model.all_tied_weights_keys}
    counts = {name: math.prod(shape) for name, shape in parameters.items()}
    num_parameters = sum(counts.values())
    if tp > 1:
        _check_heads(config, tp)
        for name in _split_by_tp(folder, len(counts), num_parameters):
            if name in counts:
                counts[name] = -(-counts[name] // tp)
    blocks: dict[str, int] = {}
    for name, count in counts.items():
        match = _BLOCK.match(name)
        if match:
            blocks[match[1]] = blocks.get(match[1], 0) + count
    apart = [n for n, p in model.named_parameters() if p is getattr(embedding, "weight", None) and p is not head.weight]
    hidden, names = config.hidden_size, list(parameters)
    first = next(iter(blocks), "")
    norms = [n for n in names if n.startswith(f"{first}.") and parameters[n] == (hidden,) and "norm" in n]
    query, key, mlp, routed = _widths(config)
    sizes = ModelSizes(
        block_parameters=tuple(blocks.values()),
        root_parameters=sum(counts.values()) - sum(blocks.values()),
        head_parameters=math.prod(tuple(head.weight.shape)) // tp,
        embedding_parameters=sum(counts.get(name, 0) for name in apart),
        vocab=config.vocab_size,
        hidden=hidden,
        query=query // tp,
        key=key // tp,
        mlp=mlp // tp,
        routed=routed,
        num_norms=max(2, len(norms)),
        has_head_norms=any(".q_norm." in name for name in names),
    )
    return sizes, num_parameters


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Elements a token: queries, keys, the inside of the MLP, and the copies that go to experts."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention: every head has keys of its own
        head_size, key_heads = config.qk_nope_head_dim + config.qk_rope_head_dim, heads
    else:
        key_heads = getattr(config, "num_key_value_heads", None) or heads
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if experts:
        expert = getattr(config, "moe_intermediate_size", None) or mlp
        shared = getattr(config, "shared_expert_intermediate_size", None)
        shared = shared if shared is not None else expert * (getattr(config, "n_shared_experts", None) or 0)
        mlp = experts * expert + shared
    return heads * head_size, key_heads * head_size, mlp, experts * config.hidden_size


def _split_by_tp(folder: Path, num_tensors: int, num_parameters: int) -> list[str]:
    """The parameters that transformers' tensor-parallel plan cuts."""
    from ckptool.naming.parallel_plan import plan_rules

    rules = plan_rules(folder, {"tp"}, num_tensors, num_parameters * DTYPE_BYTES["fp32"])
    return [rule.pattern for rule in rules]


def _check_heads(config: Any, tp: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % tp:
            raise UsageError(f"--tp {tp} doesn't divide the model's {name}, {number}", hint="another --tp, or none")


def _moment_bytes(optimizer: str, dtype: str | None, param_dtype: str) -> float:
    """Of one moment of one parameter."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    if optimizer == "adamw":
        return _dtype_bytes(dtype or param_dtype)
    if dtype is not None:
        raise UsageError(f"--optimizer-dtype {dtype} says nothing with --optimizer {optimizer}, whose state is codes")
    return EIGHT_BIT_MOMENT_BYTES


def _dtype_bytes(name: str) -> int:
    if name not in DTYPE_BYTES:
        raise UsageError(f"{name} is no dtype to train in: choose one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
