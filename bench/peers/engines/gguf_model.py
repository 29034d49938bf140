# mypy: disable-error-code="import-not-found"
"""A Llama of transformers as a float32 GGUF file without a tokenizer, for llama.cpp; or a GGUF file
in another format.

python -m bench.peers.engines.gguf_model FOLDER                     # writes FOLDER/model.gguf
python -m bench.peers.engines.gguf_model FOLDER FILE.gguf Q4_K_M    # the same of FILE.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of a query or key projection, [heads * D, hidden], in llama.cpp's order.

    transformers rotates dimension i of a head with i + D / 2, llama.cpp 2 i with 2 i + 1: so row i
    of each head goes to 2 i, and row i + D / 2 to 2 i + 1. Scores stay what they are.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def convert(folder: Path) -> Path:
    """Write the model in `folder` there; without an output layer, the embedding is that, too."""
    import gguf
    from safetensors.numpy import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for name, weight in load_file(folder / "model.safetensors").items():
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if projection in heads:
            weight = interleave(weight, heads[projection])
        tensor = names.get_name(name, (".weight",))
        assert tensor is not None, f"llama.cpp has no name for {name}"
        writer.add_tensor(tensor, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(folder: Path, file: str, kind: str) -> None:
    """Write `file` there with the weights rounded, once more if they were, as llama.cpp does it."""
    import llama_cpp as api

    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    if api.llama_model_quantize(file.encode(), str(folder / "model.gguf").encode(), params):
        raise RuntimeError(f"llama.cpp could not write {file} as {kind}")


if __name__ == "__main__":
    (quantize if len(sys.argv) > 2 else convert)(Path(sys.argv[1]), *sys.argv[2:])
