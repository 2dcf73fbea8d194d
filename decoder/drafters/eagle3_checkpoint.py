"""Loads an EAGLE-3 checkpoint (Li et al. 2025), strictly: every mistake here would show only as low acceptance.

Two spellings are read: `midlayer.*` with a flat configuration, and `layers.0.*` with the layer's configuration
nested in `transformer_layer_config`. Head counts come from the tensors: published cards are wrong about them.
Nothing is defaulted in silence; a switch that isn't known is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...schedules.recipe import Recipe
from ...shapes.fields import Fields, read_table
from ...shapes.model import ModelShape
from ..backend import DraftNetwork, Model
from ..checkpoint.loader import read_safetensors
from ..checkpoint.rope import rope_kind
from ..checkpoint.weights import Tensors, check_tensors, random_tensors
from ..errors import LoadError
from ..selection import Options, select_schedules
from .eagle3 import Eagle3Drafter
from .int8 import dequantise_rows

LAYER, OTHER_LAYER = "midlayer.", "layers.0."
EMBEDDING = "embed_tokens.weight"
DEFAULT_THETA = 10000.0  # what a configuration without rope_theta means
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
KNOWN = {"norm_before_residual", "draft_vocab_size", "target_hidden_size", "eagle_config", "rms_norm_eps", "norm_eps",
         "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "target_model_type", "target_vocab_size",
         *UNSUPPORTED}
TELLTALE = ("norm", "eagle", "draft", "target", "fc_", "aux_hidden")  # a key with one of these changes the drafter


@dataclass(frozen=True)
class Eagle3Config:
    """shape: of the one layer, with the drafter's own RoPE; norm_before_residual: the residual is the normed feature;
    layer_ids: as the configuration names them, or None."""

    shape: ModelShape
    norm_before_residual: bool
    layer_ids: tuple[int, ...] | None


def load_eagle3(path: Path, target: Model, recipe: Recipe, device: torch.device, capacity: int,
                options: Options) -> Eagle3Drafter:
    """A drafter for this target.

    Raises:
        LoadError: a tensor that is missing, left over or misshapen; a switch that isn't supported; a vocabulary map
        that
            contradicts itself; layer ids that follow neither convention; sizes that aren't the target's.
"""
    tensors = rename(read_tensors(path))
    config = read_config(path, tensors)
    shape = config.shape
    where = f"drafter {path}"
    if shape.target_hidden_size != target.shape.hidden_size:
        raise LoadError(f"{where}: made for a hidden size of {shape.target_hidden_size}",
                        expected=f"{target.shape.hidden_size}, the target's", action="use a drafter of this target")
    if EMBEDDING not in tensors and shape.hidden_size != target.shape.hidden_size:
        raise LoadError(f"{where}: no {EMBEDDING}, and its hidden size {shape.hidden_size} isn't the target's "
                        f"{target.shape.hidden_size}", expected="an embedding of its own")
    if shape.vocab_size != target.shape.vocab_size:
        raise LoadError(f"{where}: a target vocabulary of {shape.vocab_size}", expected=f"{target.shape.vocab_size}")
    if shape.max_position < capacity:
        raise LoadError(f"{where}: {shape.max_position} positions", expected=f"at least {capacity}, the capacity of the "
                        "target's cache", action=f"load with capacity={shape.max_position}")
    ids = target_ids(tensors, shape, where)
    check_tensors(tensors, expected_tensors(shape, EMBEDDING in tensors), where)
    own = tensors.pop(EMBEDDING, None)
    embedding = target.embedding if own is None else own
    model = make_network(shape, tensors, embedding, ids, recipe, device, config.norm_before_residual, target, options)
    return Eagle3Drafter(model, feature_layers(config.layer_ids, target.shape.num_layers, where), capacity)


def make_network(shape: ModelShape, tensors: Tensors, embedding: torch.Tensor, ids: torch.Tensor, recipe: Recipe,
                 device: torch.device, norm_before_residual: bool, target: Model, options: Options) -> DraftNetwork:
    """The network on the target's backend."""
    if target.notes.name == "torch":
        from ..on_torch.eagle3 import Eagle3Model

        return Eagle3Model(shape, tensors, embedding, ids, recipe, device, norm_before_residual, target.vocab_limit)
    from ..on_gpu.eagle3 import TritonEagle3Model

    return TritonEagle3Model(shape, tensors, embedding, ids, recipe, device, norm_before_residual, target.vocab_limit,
                             select_schedules(recipe, shape, device, options), options)


def random_eagle3(seed: int, shape: ModelShape, target: Model, recipe: Recipe, device: torch.device, capacity: int,
                  options: Options) -> Eagle3Drafter:
    """A drafter of random weights, for time and bits: its head's rows stand for ids spread evenly over the vocabulary.

    Raises:
        LoadError: a shape that isn't a drafter of this target.
    """
    if shape.architecture != "eagle3" or shape.target_hidden_size != target.shape.hidden_size \
            or shape.hidden_size != target.shape.hidden_size or shape.vocab_size != target.shape.vocab_size:
        raise LoadError(f"drafter shape {shape.name}", expected=f"an EAGLE-3 drafter of {target.shape.name}: hidden size "
                        f"{target.shape.hidden_size}, vocabulary {target.shape.vocab_size}")
    rows = shape.draft_vocab_size or shape.vocab_size
    ids = torch.arange(rows) * shape.vocab_size // rows
    tensors = random_tensors(expected_tensors(shape, False), seed, device)
    model = make_network(shape, tensors, target.embedding, ids, recipe, device, False, target, options)
    return Eagle3Drafter(model, feature_layers(None, target.shape.num_layers, shape.name), capacity)


def read_tensors(path: Path) -> Tensors:
    """From model.safetensors, int8 rows dequantised, or pytorch_model.bin read without running code."""
    binary = path / "pytorch_model.bin"
    if (path / "model.safetensors").is_file() or not binary.is_file():
        return dequantise_rows(read_safetensors(path), str(path))
    try:
        return dict(torch.load(binary, map_location="cpu", weights_only=True))
    except Exception as e:  # pickle raises many kinds
        raise LoadError(f"{binary}: {str(e).splitlines()[0]}", expected="tensors by name") from None


def rename(tensors: Tensors) -> Tensors:
    """The `layers.0.` spelling as `midlayer.`. Raises LoadError where both stand there."""
    if all(any(n.startswith(p) for n in tensors) for p in (LAYER, OTHER_LAYER)):
        raise LoadError("an EAGLE-3 checkpoint with both midlayer.* and layers.0.*", expected="one spelling")
    return {LAYER + n.removeprefix(OTHER_LAYER) if n.startswith(OTHER_LAYER) else n: t for n, t in tensors.items()}


def read_config(path: Path, tensors: Tensors) -> Eagle3Config:
    """The configuration in either spelling, its head counts taken from the tensors."""
    outer = read_table(path / "config.json", LoadError)
    nested = outer.get("transformer_layer_config") or {}
    merged: dict[str, Any] = {**nested, **{k: v for k, v in outer.items() if k != "transformer_layer_config"}}
    where = str(path / "config.json")
    refuse_switches(merged, where)
    fields = Fields(merged, where, LoadError)
    hidden, heads = fields.positive("hidden_size", int), fields.positive("num_attention_heads", int)
    head_dim = fields.positive("head_dim", int, hidden // heads)
    rope = dict(fields.get("rope_parameters", dict, {}) or fields.get("rope_scaling", dict, {}))
    theta = float(rope.pop("rope_theta", None) or fields.positive("rope_theta", float, DEFAULT_THETA))
    scaling = rope if rope_kind(rope or None) != "default" else None

    def rows(name: str) -> int:
        tensor = tensors.get(f"{LAYER}self_attn.{name}_proj.weight")
        if tensor is None or tensor.shape[0] % head_dim:
            raise LoadError(f"{where}: {LAYER}self_attn.{name}_proj.weight is missing or no multiple of head_dim {head_dim}")
        return int(tensor.shape[0]) // head_dim

    fc, head = tensors.get("fc.weight"), tensors.get("lm_head.weight")
    if fc is None or head is None or fc.ndim != 2 or fc.shape[1] % 3:
        raise LoadError(f"{where}: fc.weight or lm_head.weight is missing or misshapen", expected="[H, 3 H_target], [V_d, H]")
    vocabulary = fields.positive("target_vocab_size", int, None) or fields.positive("vocab_size", int)
    shape = ModelShape(
        name=path.name, architecture="eagle3", hidden_size=hidden, intermediate_size=fields.positive("intermediate_size", int),
        num_layers=1, num_heads=rows("q"), num_kv_heads=rows("k"), head_dim=head_dim, vocab_size=vocabulary,
        rope_theta=theta, rms_norm_eps=fields.positive("rms_norm_eps", float, 1e-6), qkv_bias=False, tie_embeddings=False,
        max_position=fields.positive("max_position_embeddings", int), source=where, rope_scaling=scaling,
        target_hidden_size=fields.positive("target_hidden_size", int, int(fc.shape[1]) // 3),
        draft_vocab_size=fields.positive("draft_vocab_size", int, int(head.shape[0])))
    inner = fields.get("eagle_config", dict, None) or {}
    ids = inner.get("eagle_aux_hidden_state_layer_ids", merged.get("eagle_aux_hidden_state_layer_ids"))
    return Eagle3Config(shape, fields.get("norm_before_residual", bool, False), None if ids is None else tuple(ids))


def refuse_switches(table: dict[str, Any], where: str) -> None:
    """Raises LoadError for a switch that is on and unsupported, or that isn't known at all."""
    for key in UNSUPPORTED:
        if table.get(key):
            raise LoadError(f"{where}: {key} is {table[key]!r}: not supported", expected="a plain EAGLE-3 layer")
    for key, value in table.items():
        if key not in KNOWN and value not in (None, False) and any(part in key for part in TELLTALE):
            raise LoadError(f"{where}: unknown switch {key} = {value!r}", expected=f"none beside {', '.join(sorted(KNOWN))}",
                            action="a switch that is ignored would show only as low acceptance")
    if table.get("hidden_act", "silu") != "silu" or table.get("attention_bias") or table.get("mlp_bias"):
        raise LoadError(f"{where}: an activation other than silu, or a bias", expected="silu and no bias")


def expected_tensors(shape: ModelShape, own_embedding: bool) -> dict[str, tuple[int, ...]]:
    """Name and size of every float tensor of a drafter."""
    hidden, middle = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * (shape.target_hidden_size or hidden)),
        "lm_head.weight": (shape.draft_vocab_size or shape.vocab_size, hidden), "norm.weight": (hidden,),
        f"{LAYER}self_attn.q_proj.weight": (heads, 2 * hidden), f"{LAYER}self_attn.k_proj.weight": (kv_heads, 2 * hidden),
        f"{LAYER}self_attn.v_proj.weight": (kv_heads, 2 * hidden), f"{LAYER}self_attn.o_proj.weight": (hidden, heads),
        f"{LAYER}mlp.gate_proj.weight": (middle, hidden), f"{LAYER}mlp.up_proj.weight": (middle, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, middle)}
    sizes |= {f"{LAYER}{n}.weight": (hidden,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    return sizes | ({EMBEDDING: (shape.vocab_size, hidden)} if own_embedding else {})


def target_ids(tensors: Tensors, shape: ModelShape, where: str) -> torch.Tensor:
    """The target id of each draft id, [V_d]. Takes d2t (offsets: id = i + d2t[i]) and t2d (membership) out of the
    tensors.

    Raises:
        LoadError: a map that is missing though the vocabularies differ, leaves the vocabulary, repeats an id, or
            contradicts t2d, as ids in the place of offsets do.
"""
    size = shape.draft_vocab_size or shape.vocab_size
    offsets, member = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if size != shape.vocab_size:
            raise LoadError(f"{where}: no d2t, and a draft vocabulary of {size} for a target's of {shape.vocab_size}",
                            expected="d2t [V_d], the offset of each draft id")
        return torch.arange(size)
    if tuple(offsets.shape) != (size,):
        raise LoadError(f"{where}: d2t is {list(offsets.shape)}", expected=f"[{size}]")
    ids = torch.arange(size) + offsets.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size or ids.unique().numel() != size:
        raise LoadError(f"{where}: d2t leaves the vocabulary or maps two draft ids to one",
                        expected="offsets: target id = i + d2t[i]", action="check that d2t doesn't hold ids")
    if member is not None:
        if tuple(member.shape) != (shape.vocab_size,):
            raise LoadError(f"{where}: t2d is {list(member.shape)}", expected=f"[{shape.vocab_size}]")
        mask = torch.zeros(shape.vocab_size, dtype=torch.bool)
        mask[ids] = True
        if not torch.equal(mask, member.bool().cpu()):
            raise LoadError(f"{where}: t2d marks other ids than i + d2t[i] gives", expected="the same set of target ids",
                            action="check that d2t holds offsets, not ids")
    return ids


def feature_layers(named: tuple[int, ...] | None, num_layers: int, where: str) -> tuple[int, ...]:
    """The target layers whose output the drafter reads.

    Two conventions are in the wild: the ids of the layers that read a feature (2, L // 2, L - 3), or of the layers that
    give it (1, L // 2 - 1, L - 4). Both mean the same features, and so does a configuration that names none. Other ids
    could mean either and are refused.
    """
    gives = (1, num_layers // 2 - 1, num_layers - 4)
    reads = tuple(i + 1 for i in gives)
    if not 0 < gives[0] < gives[1] < gives[2]:
        raise LoadError(f"{where}: a target of {num_layers} layers", expected="at least 7 layers, for three features")
    if named is not None and named not in (gives, reads):
        raise LoadError(f"{where}: eagle_aux_hidden_state_layer_ids is {list(named)}",
                        expected=f"{list(reads)} (layers that read the features) or {list(gives)} (layers that give them)",
                        action="other ids could mean either convention, so they are refused")
    return gives
