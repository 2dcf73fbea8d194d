"""Writes a trained drafter in the published layout: config.json and model.safetensors, in bf16 or int8 rows."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from ....shapes.files import replace_text
from ....shapes.model import ModelShape
from ...checkpoint.loader import read_safetensors
from ...checkpoint.weights import Tensors
from ..int8 import dequantise_rows, quantise_rows
from .network import DrafterNetwork
from .vocabulary import vocabulary_maps

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def drafter_shape(target: ModelShape, draft_vocab: int) -> ModelShape:
    """The shape of a target's drafter: one layer of the target's sizes. draft_vocab: rows of its head."""
    return replace(target, name=f"{target.name}-eagle3", architecture="eagle3", num_layers=1, qkv_bias=False,
                   qk_norm=False, tie_embeddings=False, target_hidden_size=target.hidden_size, draft_vocab_size=draft_vocab)


def write_drafter(folder: Path, network: DrafterNetwork, layers: tuple[int, ...], storage: str) -> None:
    """Writes both files. layers: target layers that give the features (the configuration names the layers that read them);
    storage: bf16 or int8."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in network.state_dict().items()}
    stored = quantise_rows(tensors) if storage == "int8" else tensors
    kept = {name: tensor if tensor.dtype == torch.int8 or name.endswith("_scale") else tensor.to(torch.bfloat16)
            for name, tensor in stored.items()}
    replace_text(folder / CONFIG, json.dumps(config_of(network.shape, layers, storage), indent=2) + "\n")
    save_file(kept | vocabulary_maps(network.ids.cpu(), network.shape.vocab_size), folder / WEIGHTS)


def config_of(shape: ModelShape, layers: tuple[int, ...], storage: str) -> dict[str, object]:
    """The configuration under the published keys. Arguments as in write_drafter."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps, "max_position_embeddings": shape.max_position, "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size, "rope_theta": shape.rope_theta,
        **({"rope_scaling": shape.rope_scaling} if shape.rope_scaling else {}), "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers], "use_aux_hidden_state": True},
        "torch_dtype": "bfloat16", "weights_stored_as": storage}


def stored_network(folder: Path, network: DrafterNetwork) -> DrafterNetwork:
    """A network like `network` with the weights of the folder."""
    tensors: Tensors = dequantise_rows(read_safetensors(folder), str(folder))
    ids = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
    del tensors["t2d"]
    found = DrafterNetwork(network.shape, ids)
    found.load_state_dict(tensors)
    return found.to(network.ids.device)
