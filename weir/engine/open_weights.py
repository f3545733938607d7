"""Opening the weights of a prepared directory, in whatever form they are."""

from __future__ import annotations

from pathlib import Path

from weir.engine.quantized_checkpoint import unquantized
from weir.engine.safetensors_file import SafetensorsCheckpoint
from weir.engine.weight_manifest import WeightManifest
from weir.engine.weights import TensorSource


def open_weights(model_dir: Path) -> TensorSource:
    """Open the weights of a prepared directory.

    Raises:
        ModelLoadError: a file is missing, of another size than when it was prepared, or damaged; names it.
    """
    manifest = WeightManifest.load(model_dir)
    paths = manifest.checked_paths(model_dir)
    if manifest.format != "gguf":
        return unquantized(SafetensorsCheckpoint(paths), model_dir)
    from weir.engine.gguf_model import GgufCheckpoint  # its library takes 0.2 s to load

    return GgufCheckpoint(paths[0])
