"""The configuration of an EAGLE-3 checkpoint. Keys are allow-listed: the only symptom of an ignored switch is low acceptance.

Two spellings are read: a flat configuration, and one with the layer nested in `transformer_layer_config`.
"""

from dataclasses import dataclass
from pathlib import Path

from ...shapes.fields import Fields, read_fields
from ...shapes.model import ModelShape, rope_of
from ..checkpoint.rope import rope_kind
from ..checkpoint.switches import HARMLESS, OFF, READ, SWITCHES, Switch, check_switches, only
from ..checkpoint.weights import Tensors
from ..errors import LoadError

LAYER = "midlayer."
NESTED, INNER, LAYER_IDS = "transformer_layer_config", "eagle_config", "eagle_aux_hidden_state_layer_ids"
FEATURES = 3  # target layers whose output the drafter reads

EAGLE_SWITCHES = {  # at the top, or in eagle_config
    "use_aux_hidden_state": Switch(only(True), "a drafter without the target's features"),
    "norm_before_fc": Switch(OFF, "a norm before fc"),
    "fc_norm": Switch(OFF, "a norm of fc's inputs"),
    "norm_output": Switch(OFF, "a normed recurrent feature"),
    "use_input_layernorm_in_first_layer": Switch(only(True), "a layer without input_layernorm"),
    "use_last_layernorm": Switch(only(True), "a head without a norm before it"),
    "use_mtp_layernorm": Switch(OFF, "the norms of multi-token prediction"),
    "parallel_draft_step": Switch(only(1), "several tokens drafted in one pass"),
    "has_lm_head": Switch(only(True), "a drafter without a head"),
    "eagle_decoder_type": Switch(only("llama"), "a layer that isn't Llama's"),
    "speculators_model_type": Switch(only("eagle3"), "another kind of drafter"),
    "num_hidden_layers": Switch(only(1), "more than one layer"),
    "tie_word_embeddings": Switch(OFF, "a head tied to the embedding"),
}
EAGLE_READ = (READ - set(EAGLE_SWITCHES)) | {INNER, LAYER_IDS, "norm_before_residual", "draft_vocab_size", "target_hidden_size",
                                             "target_vocab_size"}
EAGLE_HARMLESS = HARMLESS | {"target_model_type", "next_layer_regular", "speculators_config", "speculators_version",
                             "has_no_defaults_at_init", "weights_stored_as"}  # the last one shows in the tensors


@dataclass(frozen=True)
class Eagle3Config:
    """shape: of the one layer, with the drafter's own RoPE; norm_before_residual: the residual is the normed feature;
    layer_ids: as in the configuration, or None; ids_read: whether these layers read the features, see feature_layers."""

    shape: ModelShape
    norm_before_residual: bool
    layer_ids: tuple[int, ...] | None
    ids_read: bool


def read_config(path: Path, tensors: Tensors) -> Eagle3Config:
    """The configuration in either spelling. The number of KV heads comes from the tensors: published configurations are wrong
    about it.

    Raises:
        LoadError: a switch that isn't supported, an unknown key, a field that contradicts the tensors.
    """
    outer = read_fields(path / "config.json", LoadError)
    nested = outer.inner(NESTED).table if outer.get(NESTED, dict, {}) else {}
    fields = Fields({**nested, **{k: v for k, v in outer.table.items() if k != NESTED}}, outer.where, LoadError)
    inner = fields.inner(INNER) if fields.get(INNER, dict, {}) else Fields({}, outer.where, LoadError)
    check_switches(fields.table, fields.where, EAGLE_READ, SWITCHES | EAGLE_SWITCHES, EAGLE_HARMLESS)
    check_switches(inner.table, inner.where, {LAYER_IDS}, EAGLE_SWITCHES, EAGLE_HARMLESS)
    own = inner.table.get(LAYER_IDS) is None
    return Eagle3Config(_shape(path.name, fields, tensors), fields.get("norm_before_residual", bool, False),
                        _layer_ids(fields if own else inner), own)


def _shape(name: str, fields: Fields, tensors: Tensors) -> ModelShape:
    hidden, heads = fields.positive("hidden_size", int), fields.positive("num_attention_heads", int)
    head_dim = fields.positive("head_dim", int, max(hidden // heads, 1))
    theta, scaling = rope_of(fields)
    rope_kind(scaling)

    def rows(name: str) -> int:
        tensor = tensors.get(f"{LAYER}self_attn.{name}_proj.weight")
        if tensor is None or tensor.ndim != 2 or tensor.shape[0] % head_dim:
            raise fields.fail("head_dim", f"{head_dim}, and {LAYER}self_attn.{name}_proj.weight is missing or no multiple of it")
        return int(tensor.shape[0]) // head_dim

    num_heads, num_kv_heads = rows("q"), rows("k")
    if num_heads != heads:
        raise fields.fail("num_attention_heads", f"{heads} heads of {head_dim}, and {LAYER}self_attn.q_proj.weight has "
                          f"{num_heads * head_dim} rows", f"{heads * head_dim} rows")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise fields.fail("head_dim", f"{head_dim} makes {num_kv_heads} KV heads of {LAYER}self_attn.k_proj.weight",
                          f"a number that divides {num_heads} heads")
    fc, head = tensors.get("fc.weight"), tensors.get("lm_head.weight")
    if fc is None or head is None or fc.ndim != 2 or head.ndim != 2 or fc.shape[1] % FEATURES:
        raise LoadError(f"{fields.where}: fc.weight or lm_head.weight is missing or misshapen",
                        expected=f"[H, {FEATURES} H_target], [V_d, H]")
    return ModelShape(
        name=name, architecture="eagle3", hidden_size=hidden, intermediate_size=fields.positive("intermediate_size", int),
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        vocab_size=fields.positive("target_vocab_size", int, None) or fields.positive("vocab_size", int),
        rope_theta=theta, rms_norm_eps=fields.positive("rms_norm_eps", float, 1e-6), qkv_bias=False, tie_embeddings=False,
        max_position=fields.positive("max_position_embeddings", int), source=fields.where, rope_scaling=scaling,
        target_hidden_size=fields.positive("target_hidden_size", int, int(fc.shape[1]) // FEATURES),
        draft_vocab_size=fields.positive("draft_vocab_size", int, int(head.shape[0])))


def _layer_ids(fields: Fields) -> tuple[int, ...] | None:
    ids = fields.get(LAYER_IDS, list, None)
    if ids is None:
        return None
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise fields.fail(LAYER_IDS, f"is {ids}", f"{FEATURES} layer ids")
    return tuple(ids)


def feature_layers(named: tuple[int, ...] | None, num_layers: int, where: str, read: bool = False) -> tuple[int, ...]:
    """The target layers whose output the drafter reads, ascending.

    The published default has two spellings: the layers that give a feature (1, L // 2 - 1, L - 4), or the layers that read it
    (2, L // 2, L - 3). Both mean the same features, and so does a configuration without ids. For other ids the place decides: in
    `eagle_config` (NVIDIA ModelOpt) they are layers that give a feature, at the top level (vLLM, speculators) layers that read
    it, each the output of the layer before.

    Args:
        named: the ids of the configuration, or None. where: the file, for errors. read: whether ids other than the default are
            layers that read the features.

    Raises:
        LoadError: not three ids; ids that don't ascend or that the target lacks; a target with too few layers.
    """
    gives = (1, num_layers // 2 - 1, num_layers - 4)
    if named is None or named in (gives, tuple(i + 1 for i in gives)):
        if not 0 < gives[0] < gives[1] < gives[2]:
            raise LoadError(f"{where}: a target of {num_layers} layers", expected=f"at least 7 layers, for {FEATURES} features")
        return gives
    if len(named) != FEATURES or list(named) != sorted(set(named)) or not 0 <= named[0] <= named[-1] < num_layers:
        raise LoadError(f"{where}: {LAYER_IDS} is {list(named)}",
                        expected=f"{FEATURES} ascending ids from 0 to {num_layers - 1}, the target's layers")
    if read and named[0] == 0:
        raise LoadError(f"{where}: {LAYER_IDS} is {list(named)}, and layer 0 reads the embedding",
                        expected="features that a layer gives")
    return tuple(i - 1 for i in named) if read else named
