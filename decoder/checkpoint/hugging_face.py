"""Hugging Face's implementation of a checkpoint's architecture, with the checkpoint's tensors, FP8 ones dequantised."""

from typing import TYPE_CHECKING

from ..errors import LoadError
from .fp8 import dequantised
from .loader import Checkpoint
from .weights import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hugging_face_from_tensors(checkpoint: Checkpoint) -> "PreTrainedModel":
    """transformers' model of the checkpoint's shape with its tensors, in their type, on the CPU.

    Raises:
        LoadError: transformers has other names for the tensors of this architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = checkpoint.config.shape
    rope = {**(shape.rope_scaling or {"rope_type": "default"}), "rope_theta": shape.rope_theta}
    config = AutoConfig.for_model(
        shape.architecture, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_embeddings, max_position_embeddings=shape.max_position, rope_parameters=rope,
        sliding_window=None)
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(dequantised(checkpoint.tensors), strict=False)
    if unexpected or set(missing) - {HEAD}:
        raise LoadError(f"Hugging Face's model lacks {missing} and doesn't know {unexpected}",
                        expected="the same tensors by the same names")
    return model
