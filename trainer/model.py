"""The model: built without a byte of weights, then given memory, ties and buffers. A checkpoint brings its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import PreTrainedModel

from ckptool import NotFoundError, UnsupportedError, UsageError
from trainer.selective import selective_contexts

#: Tables of positions may begin with some rows that stand for none (OPT's with 2).
_MAX_POSITION_OFFSET = 8

#: What wrappers put into names (torch's of activation checkpointing, peft's of an adapter), and what checkpoints have.
_WRAPPED = {
    "_checkpoint_wrapped_module.": "",
    ".base_layer.": ".",
    ".lora_A.default.": ".lora_A.",
    ".lora_B.default.": ".lora_B.",
}


def build_meta_model(hf_folder: Path, dtype: torch.dtype, tie_embeddings: bool = True) -> PreTrainedModel:
    """The causal language model of a Hugging Face config, on the meta device, in training mode.

    `tie_embeddings=False` keeps apart what the config ties, for weights that differ although the config ties them.
    Raises NotFoundError without a config, UnsupportedError when this transformers has no such model.
    """
    if not (hf_folder / "config.json").is_file():
        raise NotFoundError(
            f"{hf_folder} holds no config.json to build the model from",
            hint="begin from a checkpoint made by ckptool import-hf",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(hf_folder, local_files_only=True, trust_remote_code=False)
        if not tie_embeddings:
            config.tie_word_embeddings = False
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a strange config makes transformers raise nearly anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"transformers {transformers.__version__} can't build the model of {hf_folder}: {reason}"
        ) from error
    return model.train()


def ties_of(model: PreTrainedModel) -> dict[str, str]:
    """Aliases and the parameters they share, by live name."""
    return dict(model.all_tied_weights_keys)


def stated_vocab_size(hf_folder: Path) -> int | None:
    """How many tokens the config.json says that the model has embeddings for; None when it doesn't say."""
    try:
        config = json.loads((hf_folder / "config.json").read_text(encoding="utf-8"))
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # building the model says what is wrong with it
    return size if isinstance(size, int) else None


def check_positions(model: PreTrainedModel, seq_len: int) -> str:
    """A note when rows of `seq_len` tokens are longer than the model's config says, or "".

    Raises UsageError when the model takes its positions from a table that has no more.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or seq_len <= limit:
        return ""
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    if any(limit <= table.num_embeddings < limit + _MAX_POSITION_OFFSET for table in tables):
        raise UsageError(f"--seq-len {seq_len}: the model has a table of {limit} positions", hint=f"--seq-len {limit}")
    return f"note: --seq-len {seq_len} is more than the {limit} positions that the model's config names"


def checkpoint_activations(model: PreTrainedModel, selective: bool = False) -> None:
    """Make every block keep only its input, and recompute itself in the backward pass; `selective`: but for the results
    that `trainer/selective.py` names.

    Raises UnsupportedError when the model doesn't say what its blocks are.
    """
    blocks = named_blocks(model)
    if not blocks:
        raise UnsupportedError(f"{type(model).__name__} names no blocks", hint="--activation-checkpointing none")
    hidden_size = model.config.get_text_config().hidden_size
    options = {"context_fn": selective_contexts(hidden_size)} if selective else {}
    for name, block in blocks.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **options))


def named_blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The repeated layers, by module name, wrapped ones with their wrapper: the outermost modules of a class that
    transformers must not split over devices."""
    classes = set(model._no_split_modules or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inner = getattr(module, "_checkpoint_wrapped_module", module)
        is_nested = any(name.startswith(f"{outer}.") for outer in blocks)
        if type(inner).__name__ in classes and not is_nested:
            blocks[name] = module
    return blocks


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by its checkpoint name, aliases of a tie included, without wrapper prefixes."""
    return {_bare(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def model_state(model: nn.Module, ties: dict[str, str]) -> dict[str, torch.Tensor]:
    """The model's tensors by checkpoint name, sharing their memory; of a tie only the parameter that is no alias."""
    return {_bare(name): tensor for name, tensor in model.state_dict().items() if _bare(name) not in ties}


def materialize(model: PreTrainedModel, device: torch.device, ties: dict[str, str], cpu_offload: bool = False) -> None:
    """Give a sharded meta model memory, and all that no checkpoint holds: ties and non-persistent buffers.

    Parameters and persistent buffers hold garbage until a checkpoint is loaded. With `cpu_offload` the parameters are
    on the host, the buffers on the device.
    """
    model.to_empty(device=torch.device("cpu") if cpu_offload else device)
    tie(model, ties)
    recompute_buffers(model)
    if cpu_offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)


def recompute_buffers(model: PreTrainedModel) -> None:
    """Fill every non-persistent buffer (rotary frequencies and the like) as an eager build would.

    This is transformers' own initialisation, as `from_pretrained` runs it, with all parameters marked as loaded.
    Raises UnsupportedError, naming the buffer, when it leaves one untouched.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    buffers = _non_persistent_buffers(model)
    for buffer in buffers.values():
        buffer.fill_(_unlikely(buffer.dtype))
    model.initialize_weights()
    for name, buffer in buffers.items():
        if buffer.numel() and buffer.dtype != torch.bool and bool(_is_untouched(buffer)):
            raise UnsupportedError(f"transformers {transformers.__version__} doesn't recompute the buffer {name}")


def tie(model: nn.Module, ties: dict[str, str]) -> None:
    """`to_empty` gives each end of a tie memory of its own: make them one parameter again."""
    parameters = named_parameters(model)
    for alias, canonical in ties.items():
        module_name, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(module_name), attribute, parameters[canonical])
    parameters = named_parameters(model)
    for alias, canonical in ties.items():
        if parameters[alias] is not parameters[canonical]:
            raise UnsupportedError(f"can't tie {alias} to {canonical}")


def _non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{module_name}.{name}": buffer
        for module_name, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


def _unlikely(dtype: torch.dtype) -> float | int | bool:
    """A value that no buffer is made of, to tell whether one was filled. Booleans have none."""
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_untouched(buffer: torch.Tensor) -> torch.Tensor:
    return (buffer.isnan() if buffer.dtype.is_floating_point else buffer == torch.iinfo(buffer.dtype).min).all()


def _bare(name: str) -> str:
    for wrapped, bare in _WRAPPED.items():
        name = name.replace(wrapped, bare)
    return name
