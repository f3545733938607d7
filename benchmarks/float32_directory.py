"""A prepared model as a Hugging Face directory in float32, for servers that do not read its GGUF file.

    python -m benchmarks.float32_directory MODEL_DIR DESTINATION

The weights are those of the file, dequantised. The directory names no end token: a server that cannot be asked to
ignore it then writes answers of full length all the same.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file

from weir.engine.open_weights import open_weights


def write_float32_directory(model_dir: Path, destination: Path) -> None:
    """`destination` exists and is empty."""
    source = open_weights(model_dir)
    tensors = {name: source.read(name).float().contiguous() for name in source.specs}
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model_dir / name).read_text())
        del config["eos_token_id"]
        (destination / name).write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, destination)


if __name__ == "__main__":
    write_float32_directory(Path(sys.argv[1]), Path(sys.argv[2]))
