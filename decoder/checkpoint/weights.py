"""The tensors of a model under their Hugging Face names, and the rule for random ones.

Loading is strict: every expected tensor must be there in its shape, and no other tensor.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from ...shapes.fields import nearest
from ...shapes.model import ModelShape
from ..errors import LoadError

Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE = "_scale"  # NAME_scale [N] fp32 beside an e4m3 NAME [N, K]
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers in old checkpoints, recomputed from the configuration


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor that a model of this shape has."""
    hidden, middle = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not shape.tie_embeddings:
        sizes[HEAD] = (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        sizes |= {
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
            f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (heads, hidden),
            f"{attention}.k_proj.weight": (kv_heads, hidden),
            f"{attention}.v_proj.weight": (kv_heads, hidden),
            f"{attention}.o_proj.weight": (hidden, heads),
            f"{mlp}.gate_proj.weight": (middle, hidden),
            f"{mlp}.up_proj.weight": (middle, hidden),
            f"{mlp}.down_proj.weight": (hidden, middle),
        }
        if shape.qkv_bias:
            sizes |= {f"{attention}.q_proj.bias": (heads,), f"{attention}.k_proj.bias": (kv_heads,),
                      f"{attention}.v_proj.bias": (kv_heads,)}
        if shape.qk_norm:
            sizes |= {f"{attention}.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    return sizes


def check_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises LoadError unless the names and sizes agree exactly and all are finite floats of 16 bits or more."""
    for name, size in expected.items():
        if name not in found:
            raise LoadError(f"{where}: tensor {name} is missing{nearest(name, found)}", expected=f"{name} {list(size)}")
        if tuple(found[name].shape) != size:
            raise LoadError(f"{where}: tensor {name} is {list(found[name].shape)}", expected=f"{list(size)}",
                            action="check that the configuration belongs to these weights")
    for name in found:
        if name not in expected:
            raise LoadError(f"{where}: tensor {name} isn't part of this model{nearest(name, expected)}",
                            expected=f"the {len(expected)} tensors of the architecture and nothing else",
                            action="use a model without it; a tensor is never dropped in silence")
    for name, tensor in found.items():
        if name + SCALE in found:
            continue  # e4m3, checked with its scales
        if tensor.dtype not in FLOATS:
            raise LoadError(f"{where}: tensor {name} is {tensor.dtype}", expected=" or ".join(str(kind) for kind in FLOATS[:3]),
                            action="use the checkpoint that isn't quantised: a recipe quantises at load")
        if not bool(torch.isfinite(tensor).all()):
            raise LoadError(f"{where}: tensor {name} holds NaN or infinity", expected="finite weights")


def drop_ignorable(tensors: Tensors, shape: ModelShape, where: str) -> None:
    """Removes tensors without effect: saved RoPE buffers, and a tied head equal to the embedding.

    Raises:
        LoadError: a tied head differs from the embedding.
    """
    for name in [n for n in tensors if n.endswith(IGNORED_SUFFIXES)]:
        del tensors[name]
    if shape.tie_embeddings and HEAD in tensors and EMBEDDING in tensors:
        if not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            raise LoadError(f"{where}: {HEAD} differs from {EMBEDDING}, and the configuration ties them",
                            expected="equal tensors, or tie_word_embeddings false")
        del tensors[HEAD]


def random_tensors(expected: Mapping[str, tuple[int, ...]], seed: int, device: torch.device) -> Tensors:
    """Random weights, for measurements of time and bits: `random:SEED`.

    Each tensor comes from its own generator on the device, seeded with the first 8 bytes of SHA-256("SEED/NAME"). Norms are 1,
    biases normal with deviation 0.1, embeddings normal with deviation 1, matrices [N, K] normal with deviation 1 / sqrt(K). A CPU
    and a GPU draw different numbers.
    """
    return {name: _random_tensor(name, size, seed, device) for name, size in expected.items()}


def _random_tensor(name: str, size: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    if len(size) == 1 and name.endswith(".weight"):
        return torch.ones(size, device=device)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    deviation = 0.1 if len(size) == 1 else 1.0 if "embed_tokens" in name else size[1] ** -0.5
    return torch.randn(size, generator=generator, device=device) * deviation


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, sizes and bytes in the order of names, as 64 hexadecimal digits. Evidence records it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def pop_linear(tensors: Tensors, prefix: str, names: Iterable[str],
               bias: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(w [N, K], bias [N] or None, scale [N] or None) of the named projections as one linear. scale: of e4m3 weights. They leave
    the dictionary: each is used once."""
    weights = [f"{prefix}{name}.weight" for name in names]
    scales = [name + SCALE for name in weights]
    return (pop_stacked(tensors, weights), pop_stacked(tensors, [f"{prefix}{name}.bias" for name in names]) if bias else None,
            pop_stacked(tensors, scales) if scales[0] in tensors else None)


def pop_stacked(tensors: Tensors, names: Iterable[str]) -> torch.Tensor:
    """The named tensors stacked on their first axis. They leave the dictionary: each is used once."""
    parts = [tensors.pop(name) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
