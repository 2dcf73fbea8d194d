"""The keys of a Hugging Face configuration: one allow-list for models and drafters. A key is read elsewhere, has no effect on the
result, or is a switch with the values that this decoder implements. Any other key is refused by name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ...shapes.fields import nearest, shown
from ..errors import LoadError


@dataclass(frozen=True)
class Switch:
    """A key that may change the result. accepts: whether this decoder implements a value; meaning: of a value that it doesn't."""

    accepts: Callable[[object], bool]
    meaning: str


def only(*values: object) -> Callable[[object], bool]:
    """A predicate that accepts these values."""
    return lambda value: value in values


def full_attention(value: object) -> bool:
    """Whether a list of layer types holds full attention alone."""
    return isinstance(value, list) and all(kind == "full_attention" for kind in value)


OFF = only(False, 0)

READ = {  # by shapes/model.py and config.py
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "tie_word_embeddings",
    "max_position_embeddings", "eos_token_id",
}

HARMLESS = {
    # identity, storage and training
    "model_type", "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "auto_map", "tokenizer_class",
    "finetuning_task", "task_specific_params", "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp",
    "is_llama_config", "unsloth_version", "unsloth_fixed", "torchscript", "use_bfloat16", "attn_implementation",
    # special tokens that don't end a request
    "bos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "prefix",
    # transformers' form of an output, and classification heads
    "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate",
    "use_cache", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "cross_attention_hidden_size",
    "tie_encoder_decoder", "tf_legacy_loss", "remove_invalid_values",
    # defaults of transformers' generation: a request here has its own settings
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    # sliding windows, which are off
    "max_window_layers",
}

SWITCHES = {
    "use_sliding_window": Switch(OFF, "sliding-window attention"),
    "sliding_window": Switch(OFF, "sliding-window attention"),
    "layer_types": Switch(full_attention, "attention other than full attention"),
    "num_experts": Switch(OFF, "a mixture of experts"),
    "num_local_experts": Switch(OFF, "a mixture of experts"),
    "n_routed_experts": Switch(OFF, "a mixture of experts"),
    "hidden_act": Switch(only("silu"), "an activation other than silu"),
    "quantization_config": Switch(lambda value: not value, "a checkpoint that is quantised already"),
    "partial_rotary_factor": Switch(only(1.0), "partial rotary embedding"),
    "rope_interleaved": Switch(OFF, "rotation of neighbouring values"),
    "use_mrope": Switch(OFF, "rotary embedding in several dimensions"),
    "mlp_bias": Switch(OFF, "a bias in the MLP"),
    "attention_bias": Switch(OFF, "a bias in every attention projection"),
    "is_encoder_decoder": Switch(OFF, "an encoder"),
    "add_cross_attention": Switch(OFF, "cross attention"),
    "is_decoder": Switch(only(True, False), "a value that isn't a bool"),
    "pruned_heads": Switch(lambda value: not value, "pruned heads"),
}


def check_switches(table: Mapping[str, object], where: str, read: Collection[str], switches: Mapping[str, Switch],
                   harmless: Collection[str] = ()) -> None:
    """Refuses a configuration that this decoder doesn't implement. A key with the value null counts as missing.

    read: keys that the caller reads; switches: keys with accepted values; harmless: keys without effect; where: the file, for
    errors.

    Raises:
        LoadError: a switch has a value that isn't accepted; a key is none of the three.
    """
    known = {*read, *switches, *harmless}
    for key, value in table.items():
        if value is None or key.startswith("_"):  # transformers' own notes
            continue
        if key not in known:
            raise LoadError(f"{where}: unknown key {key} = {shown(value)}{nearest(key, known)}",
                            expected="keys whose effect on the result is known",
                            action="use a checkpoint without it, or remove it from the configuration if it has no effect")
        switch = switches.get(key)
        if switch is not None and key not in read and not switch.accepts(value):
            raise LoadError(f"{where}: {key} is {shown(value)}: {switch.meaning} is not supported",
                            action="use a checkpoint without it")
