"""A Hugging Face folder of a Llama of random weights, for multi.py and startup.py.

python benchmarks/gpu/random_model.py FOLDER --size small --device cuda
"""

from __future__ import annotations

import json
from pathlib import Path

import click

#: Sizes of a Llama, and the tokens of a sequence.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "seq_len": 32},
    "small": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 14,
        "vocab_size": 32_000,
        "seq_len": 2048,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
        "seq_len": 4096,
    },
}
HEAD_SIZE = {"tiny": 16, "small": 128, "8b": 128}


def make_model(folder: Path, size: str, device: str) -> None:
    """Write a Hugging Face folder of random bf16 weights, a file a layer, and a tokenizer of bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    sizes = {name: number for name, number in SIZES[size].items() if name != "seq_len"}
    heads = sizes["hidden_size"] // HEAD_SIZE[size]
    config = transformers.LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 4),
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=256,
    )
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in shapes.items():
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensor = made.fill_(1) if len(shape) < 2 else made.normal_(0, 0.02)
        files.setdefault(".".join(name.split(".")[:3]), {})[name] = tensor.cpu()
    names = {part: f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i, part in enumerate(files)}
    for part, tensors in files.items():
        save_file(tensors, folder / names[part], {"format": "pt"})
    weight_map = {name: names[part] for part, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(folder: Path, size: str, device: str) -> None:
    """Make the model."""
    make_model(folder, size, device)


if __name__ == "__main__":
    main()
