"""Loads an EAGLE-3 checkpoint (Li et al. 2025). Loading is strict: the only symptom of a mistake would be low acceptance.

Two spellings of tensors are read: `midlayer.*` and `layers.0.*`. eagle3_config.py reads the configuration.
"""

from pathlib import Path

import torch

from ...shapes.model import ModelShape
from ..backend import DraftWeights, Model
from ..checkpoint.loader import read_safetensors
from ..checkpoint.weights import Tensors, check_tensors, random_tensors
from ..errors import LoadError
from ..selection import Options
from .eagle3 import Eagle3Drafter
from .eagle3_config import LAYER, feature_layers, read_config
from .int8 import dequantise_rows

OTHER_LAYER = "layers.0."
EMBEDDING = "embed_tokens.weight"


def load_eagle3(path: Path, target: Model, device: torch.device, capacity: int, options: Options) -> Eagle3Drafter:
    """The drafter in a folder, for this target. capacity: tokens of its cache.

    Raises:
        LoadError: a tensor is missing, left over or misshapen; a switch isn't supported; the vocabulary map contradicts itself;
            layer ids or sizes don't fit the target.
        NotPromoted: see select_schedules.
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
    if shape.vocab_size < target.vocab_limit:  # rows beyond the tokenizer's ids are padding
        raise LoadError(f"{where}: a target vocabulary of {shape.vocab_size}", expected=f"at least {target.vocab_limit}, the ids "
                        "that the target may emit")
    ids = target_ids(tensors, shape, where)
    check_tensors(tensors, expected_tensors(shape, EMBEDDING in tensors), where)
    own = tensors.pop(EMBEDDING, None)
    embedding = target.embedding if own is None else own
    model = target.draft_network(DraftWeights(shape, tensors, embedding, ids, config.norm_before_residual), device, options)
    return Eagle3Drafter(model, feature_layers(config.layer_ids, target.shape.num_layers, where, config.ids_read), capacity)


def random_eagle3(seed: int, shape: ModelShape, target: Model, device: torch.device, capacity: int,
                  options: Options) -> Eagle3Drafter:
    """A drafter of random weights, for measurements of time and bits. Its draft vocabulary is spread evenly over the target's.

    Raises:
        LoadError: the shape isn't that of a drafter of this target.
        NotPromoted: see select_schedules.
    """
    if shape.architecture != "eagle3" or shape.target_hidden_size != target.shape.hidden_size \
            or shape.hidden_size != target.shape.hidden_size or shape.vocab_size < target.vocab_limit:
        raise LoadError(f"drafter shape {shape.name}", expected=f"an EAGLE-3 drafter of {target.shape.name}: hidden size "
                        f"{target.shape.hidden_size}, vocabulary {target.shape.vocab_size}")
    rows = shape.draft_vocab_size or shape.vocab_size
    ids = torch.arange(rows) * min(shape.vocab_size, target.shape.vocab_size) // rows
    tensors = random_tensors(expected_tensors(shape, False), seed, device)
    model = target.draft_network(DraftWeights(shape, tensors, target.embedding, ids), device, options)
    return Eagle3Drafter(model, feature_layers(None, target.shape.num_layers, shape.name), capacity)


def read_tensors(path: Path) -> Tensors:
    """The tensors of model.safetensors, int8 rows dequantised, or of pytorch_model.bin, read without running code. Raises
    LoadError."""
    binary = path / "pytorch_model.bin"
    if (path / "model.safetensors").is_file() or not binary.is_file():
        return dequantise_rows(read_safetensors(path), str(path))
    try:
        return dict(torch.load(binary, map_location="cpu", weights_only=True))
    except Exception as e:  # pickle raises many kinds
        raise LoadError(f"{binary}: {str(e).splitlines()[0]}", expected="tensors by name") from None


def rename(tensors: Tensors) -> Tensors:
    """The tensors with `layers.0.` renamed to `midlayer.`. Raises LoadError if both are there."""
    if all(any(n.startswith(p) for n in tensors) for p in (LAYER, OTHER_LAYER)):
        raise LoadError("an EAGLE-3 checkpoint with both midlayer.* and layers.0.*", expected="one spelling")
    return {LAYER + n.removeprefix(OTHER_LAYER) if n.startswith(OTHER_LAYER) else n: t for n, t in tensors.items()}


def expected_tensors(shape: ModelShape, own_embedding: bool) -> dict[str, tuple[int, ...]]:
    """Name and size of every float tensor of a drafter. own_embedding: whether it has an embedding."""
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
    """The target id of each draft id, [V_d] int64. Removes d2t (offsets: id = i + d2t[i]) and t2d (membership) from the tensors.

    Raises:
        LoadError: d2t is missing though the vocabularies differ, leaves the vocabulary, repeats an id, or contradicts t2d, as
            ids in place of offsets do.
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
