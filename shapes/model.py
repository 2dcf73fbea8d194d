"""Model shapes: the sizes of a decoder-only transformer, and the shape of each kernel of its decode step.

A shape comes from a shipped TOML file (by name) or from a Hugging Face `config.json` (by path), with the same checks.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from .errors import ShapeError, UserError
from .fields import Fields, Name, Positive, PositiveInt, Table, nearest, read_fields
from .own import OwnShape, own_shape

SHIPPED = Path(__file__).parent
HUGGING_FACE = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
                "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLMEagle3": "eagle3"}
DEFAULT_THETA = 10000.0  # of a configuration without rope_theta
ARCHITECTURES = tuple(HUGGING_FACE.values())


@dataclass(frozen=True)
class LinearShape:
    """y = x @ w.T: x [rows, K], w [N, K], y [rows, N]. dtype: of x and w, e4m3 (with scales) or bf16. terms: e4m3 terms per value
    of x. swiglu: rows of w are gates and ups, and y is silu(gate) * up, [rows, N / 2]."""

    N: int
    K: int
    dtype: str = "e4m3"
    bias: bool = False
    terms: int = 1
    swiglu: bool = False


@dataclass(frozen=True)
class HeadShape:
    """Language-model head, w [N, K]: N is the vocabulary, K the hidden size. dtype, terms: as in LinearShape. A model's head is
    bf16, a drafter's has the format of its linears."""

    N: int
    K: int
    dtype: str = "bf16"
    terms: int = 1


@dataclass(frozen=True)
class CertifiedHeadShape:
    """A bf16 head, w [N, K], whose copy is screened. copy: the copy's type; in old files N and K alone are a plain head's."""

    N: int
    K: int
    copy: str = "int8"


@dataclass(frozen=True)
class RescoreShape:
    """The ids of a bf16 head, w [N, K], that a screen left. BLOCK_K: of the plain head's schedule."""

    N: int
    K: int
    BLOCK_K: int


@dataclass(frozen=True)
class AttentionShape:
    """Grouped-query decode attention over a KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class PersistentAttentionShape:
    """Decode attention over many chunks of keys in one persistent launch. chunk, TILE: as in AttentionSchedule."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    chunk: int
    TILE: int


@dataclass(frozen=True)
class MergeShape:
    """Merge of split-KV partials: one row of head_dim values per head."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class NormShape:
    """Residual and RMSNorm over rows of H values. split_k: partials of the added linear; 1: bf16; 0: none. embeds: the residual
    starts from the embedding. quantised: e4m3 output, else bf16. feature: copies the residual. one_row: reads one row, whose
    index is on the device."""

    H: int
    split_k: int
    embeds: bool = False
    quantised: bool = True
    feature: bool = False
    one_row: bool = False


@dataclass(frozen=True)
class RopeShape:
    """Rotary embedding and KV append. split_k: as in NormShape, at least 1. rows: per program. qk_norm: as in ModelShape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    split_k: int
    rows: int = 1
    qk_norm: bool = False


@dataclass(frozen=True)
class DraftNormShape:
    """Norms before an EAGLE-3 layer, of embedding and feature, H values each. quantised: as in NormShape. normed_residual: the
    residual is the normed feature."""

    H: int
    quantised: bool
    normed_residual: bool


@dataclass(frozen=True)
class RowShape:
    """An elementwise kernel over rows of N values."""

    N: int


@dataclass(frozen=True)
class QuantiseShape:
    """Rows of N values as two e4m3 terms. parts: parts of a row with given maxima; 0 without maxima."""

    N: int
    parts: int


@dataclass(frozen=True)
class ReduceShape:
    """Argmax over the head's blocks, for any vocabulary. mapped: ids are mapped to other ids."""

    mapped: bool


@dataclass(frozen=True)
class AcceptShape:
    """The verdict on a round of up to `rows` verified rows."""

    rows: int


@dataclass(frozen=True)
class DraftTokenShape:
    """A draft token is written to the rows to verify. scripted: a script replaces the drafter."""

    scripted: bool


@dataclass(frozen=True)
class LookupShape:
    """An n-gram look-up: the longest key, in tokens."""

    longest: int


KernelShape = (LinearShape | HeadShape | CertifiedHeadShape | RescoreShape | AttentionShape | PersistentAttentionShape
               | MergeShape | NormShape | RopeShape | DraftNormShape | RowShape | QuantiseShape | ReduceShape | AcceptShape
               | DraftTokenShape | LookupShape | OwnShape)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. source: of the sizes. target_hidden_size, draft_vocab_size: for an EAGLE-3 drafter (architecture
    eagle3), the target's hidden size and the rows of its small head. qk_norm: each head of q and k is normed before RoPE."""

    name: Name
    architecture: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    rope_theta: Positive
    rms_norm_eps: Positive
    qkv_bias: bool
    tie_embeddings: bool
    max_position: PositiveInt
    source: str
    rope_scaling: Mapping[str, object] | None = None
    target_hidden_size: PositiveInt | None = None
    draft_vocab_size: PositiveInt | None = None
    qk_norm: bool = False

    @property
    def sizes(self) -> dict[str, object]:
        """The sizes without labels. Files have its digest: a size that was added later is left out if the model doesn't use
        it."""
        later = () if self.qk_norm else ("qk_norm",)
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("name", "source", *later)}

    @property
    def digest(self) -> str:
        """Digest of the sizes, which identify a model: 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.sizes, sort_keys=True).encode()).hexdigest()[:16]

    def shared_by(self, gpus: int) -> "ModelShape":
        """The part that each of so many GPUs computes under tensor parallelism: heads, the MLP's width and the vocabulary are
        divided, the residual stream is whole. Raises ShapeError for a number that doesn't divide them."""
        if gpus == 1:
            return self
        names = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size", "draft_vocab_size")
        sizes = {name: vars(self)[name] for name in names if vars(self)[name] is not None}
        for name, size in sizes.items():
            unit = 16 if name == "intermediate_size" else 1
            if size % (gpus * unit):
                raise ShapeError(f"{name} {size} of {self.name} can't be shared by {gpus} GPUs",
                                 expected="a divisor" + (f" that leaves a multiple of {unit}" if unit > 1 else ""),
                                 action=f"choose --tp {_divisor(sizes.values())} or a divisor of it")
        return dataclasses.replace(self, name=f"{self.name}-tp{gpus}", **{name: size // gpus for name, size in sizes.items()})

    @property
    def attention_shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def merge_shape(self) -> MergeShape:
        return MergeShape(self.num_heads, self.head_dim)

    def linear_shapes(self, dtype: str = "e4m3", terms: int = 1) -> dict[str, LinearShape]:
        """The decode step's linears by kernel. dtype, terms: as in LinearShape."""
        drafter = self.architecture == "eagle3"
        qkv_in = 2 * self.hidden_size if drafter else self.hidden_size  # EAGLE-3: embedding and feature, concatenated
        heads_out = self.num_heads * self.head_dim
        qkv_out = heads_out + 2 * self.num_kv_heads * self.head_dim
        shapes = {
            "qkv": LinearShape(qkv_out, qkv_in, dtype, self.qkv_bias, terms),
            "o": LinearShape(self.hidden_size, heads_out, dtype, terms=terms),
            "gate_up": LinearShape(2 * self.intermediate_size, self.hidden_size, dtype, terms=terms, swiglu=True),
            "down": LinearShape(self.hidden_size, self.intermediate_size, dtype, terms=terms),
        }
        if drafter:
            shapes["fc"] = LinearShape(self.hidden_size, 3 * (self.target_hidden_size or self.hidden_size), dtype, terms=terms)
        return shapes

    def kernel_shapes(self, dtype: str = "e4m3", terms: int = 1) -> dict[str, KernelShape]:
        """The shapes of the decode step's tunable kernels, by kernel. dtype, terms: as in LinearShape."""
        small = (dtype, terms) if self.architecture == "eagle3" else ()
        head = HeadShape(self.draft_vocab_size or self.vocab_size, self.hidden_size, *small)
        return {**self.linear_shapes(dtype, terms), "attention": self.attention_shape, "merge": self.merge_shape,
                "lm_head": head, "lm_head_logits": head,
                **({} if small else {"lm_head_certified": CertifiedHeadShape(head.N, head.K)})}


def _divisor(sizes: Iterable[int]) -> int:
    """The largest number that divides all."""
    return math.gcd(*sizes)


def shipped_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def load_model_shape(name_or_path: str) -> ModelShape:
    """A shape by shipped name, or from a Hugging Face `config.json` (the file or its folder).

    Raises:
        ShapeError: an unknown name; an unreadable file; a field that is missing, wrong or contradicts another.
    """
    path = Path(name_or_path)
    if name_or_path in shipped_names():
        return _from_toml(SHIPPED / f"{name_or_path}.toml")
    if path.suffix == ".toml" and os.path.isfile(path):
        return _from_toml(path)
    if os.path.isdir(path):
        path = path / "config.json"
    if path.suffix == ".json" or os.path.isfile(path):
        return _from_config(path)
    raise ShapeError(
        f"unknown model {name_or_path!r}{nearest(name_or_path, shipped_names())}",
        expected=f"one of {', '.join(shipped_names())}, or the path of a Hugging Face config.json",
        action="name a shipped shape, or pass --model path/to/config.json",
    )


def _from_toml(path: Path) -> ModelShape:
    fields = read_fields(path, ShapeError)
    return _checked(fields.read(ModelShape), fields)


def _from_config(path: Path) -> ModelShape:
    """A shape from a Hugging Face configuration. Keys that don't affect sizes are ignored; contradictions raise ShapeError."""
    fields = read_fields(path, ShapeError)
    named = fields.get("architectures", list)
    known = [a for a in named if isinstance(a, str) and a in HUGGING_FACE]
    if len(known) != 1:
        raise fields.fail("architectures", f"is {named!r}", expected=f"one of {', '.join(HUGGING_FACE)}",
                          action="use a Qwen2, Qwen3, Llama or Mistral model; mixtures of experts and others aren't supported")
    architecture = HUGGING_FACE[known[0]]
    num_heads = fields.positive("num_attention_heads", int)
    hidden_size = fields.positive("hidden_size", int)
    head_dim = fields.positive("head_dim", int, None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.fail("num_attention_heads", f"{num_heads} doesn't divide hidden_size {hidden_size}",
                              expected="a divisor of hidden_size, or an explicit head_dim")
        head_dim = hidden_size // num_heads
    theta, scaling = rope_of(fields)
    biased = fields.get("attention_bias", bool, architecture == "qwen2")
    eps = fields.positive("rms_norm_eps", float, 1e-6)
    shape = ModelShape(
        name=_label(path), architecture=architecture, hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size", int), num_layers=fields.positive("num_hidden_layers", int),
        num_heads=num_heads, num_kv_heads=fields.positive("num_key_value_heads", int, num_heads),
        head_dim=head_dim, vocab_size=fields.positive("vocab_size", int), rope_theta=theta, rms_norm_eps=eps,
        qkv_bias=biased, tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        max_position=fields.positive("max_position_embeddings", int), source=str(path.name),
        rope_scaling=scaling,
        target_hidden_size=fields.positive("target_hidden_size", int, hidden_size if architecture == "eagle3" else None),
        draft_vocab_size=fields.positive("draft_vocab_size", int, None), qk_norm=architecture == "qwen3",
    )
    return _checked(shape, fields)


def _label(path: Path) -> str:
    """A model's name: that of the file's folder, with only the characters of a name. Links of Hugging Face's cache aren't
    followed."""
    label = re.sub(r"[^A-Za-z0-9_.+-]+", "-", path.parent.resolve().name).lstrip(".+-")[:100]
    return label or "model"


def rope_of(fields: Fields) -> tuple[float, dict[str, object] | None]:
    """(theta, scaling) of a Hugging Face configuration with `rope_theta` and `rope_scaling`, or with both in `rope_parameters`.
    scaling: None for plain RoPE; else has `rope_type`.

    Raises `fields.error` for contradictions, partial rotation, and parameters of plain RoPE.
    """
    tables = {name: fields.inner(name) for name in ("rope_parameters", "rope_scaling") if fields.get(name, dict, {})}
    thetas = {"rope_theta": fields.positive("rope_theta", float, None)}
    thetas |= {f"{name}.rope_theta": table.positive("rope_theta", float, None) for name, table in tables.items()}
    given = {name: theta for name, theta in thetas.items() if theta is not None}
    if len(set(given.values())) > 1:
        raise fields.fail("rope_theta", " but ".join(f"{name} is {theta:g}" for name, theta in given.items()), "one value")
    scalings = [_scaling(table) for table in tables.values()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise fields.fail("rope_scaling", "contradicts rope_parameters", "the same parameters, or one of the two")
    return next(iter(given.values()), DEFAULT_THETA), scalings[0] if scalings else None


def _scaling(table: Fields) -> dict[str, object] | None:
    """The scaling in `rope_parameters` or `rope_scaling`; None for plain RoPE."""
    kind, other = table.get("rope_type", str, None), table.get("type", str, None)
    if kind and other and kind != other:
        raise table.fail("rope_type", f"is {kind!r}, and type is {other!r}", "one kind")
    if table.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise table.fail("partial_rotary_factor", f"is {table.table['partial_rotary_factor']}: partial rotary embedding", "1.0")
    rest = {name: value for name, value in table.table.items() if name not in table.known and value is not None}
    kind = kind or other or "default"
    if kind == "default" and rest:
        raise table.fail(next(iter(rest)), "a parameter of plain RoPE, which has none", "rope_theta alone, or another rope_type")
    return None if kind == "default" else {"rope_type": kind, **rest}


def _checked(shape: ModelShape, fields: Fields) -> ModelShape:
    if shape.architecture not in ARCHITECTURES:
        raise fields.fail("architecture", f"is {shape.architecture!r}{nearest(shape.architecture, ARCHITECTURES)}",
                          expected=f"one of {', '.join(ARCHITECTURES)}")
    if shape.num_heads % shape.num_kv_heads:
        raise fields.fail("num_kv_heads", f"{shape.num_kv_heads} doesn't divide num_heads {shape.num_heads}",
                          expected="every KV head to serve the same number of query heads")
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= 256:
        raise fields.fail("head_dim", f"is {shape.head_dim}", expected="a multiple of 16 from 16 to 256")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(shape, name) % 16:
            raise fields.fail(name, f"{getattr(shape, name)} isn't a multiple of 16",
                              expected="rows of weights that are aligned to 16 bytes")
    if shape.architecture == "eagle3" and not (shape.target_hidden_size and shape.draft_vocab_size):
        raise fields.fail("draft_vocab_size", "missing", expected="draft_vocab_size and target_hidden_size of a drafter")
    for name, top in (("hidden_size", 2**17), ("intermediate_size", 2**20), ("vocab_size", 2**22),
                      ("num_layers", 2**12), ("num_heads", 2**12)):
        if getattr(shape, name) > top:
            raise fields.fail(name, f"is {getattr(shape, name)}", expected=f"at most {top}")
    return shape


def shape_to_dict(shape: KernelShape) -> Table:
    """As in files: the sizes by name; those of a user's kernel in a table `dims`."""
    return {"dims": dict(shape.dims)} if isinstance(shape, OwnShape) else dataclasses.asdict(shape)


def dims_of(shape: KernelShape) -> Mapping[str, object]:
    """The sizes by name, of any shape."""
    return shape.dims if isinstance(shape, OwnShape) else vars(shape)


def shape_from_dict(table: Mapping[str, object], where: str, error: type[UserError] = ShapeError) -> KernelShape:
    """A kernel's shape of the type that has exactly these fields. Raises `error` if there is none."""
    if set(table) == {"dims"}:
        if not isinstance(table["dims"], Mapping):
            raise error(f"{where}: dims is {table['dims']!r}"[:200], expected="a table of sizes")
        return own_shape(table["dims"], where, error)
    if set(table) == {"N", "K"}:  # a head in old files
        table = {**table, "dtype": "bf16", "terms": 1}
    if set(table) == {"num_heads", "num_kv_heads", "head_dim", "split_k"}:  # a RoPE in old files
        table = {**table, "rows": 1}
    if set(table) == {"num_heads", "num_kv_heads", "head_dim", "split_k", "rows"}:  # before qk_norm
        table = {**table, "qk_norm": False}
    for kind in get_args(KernelShape):
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if set(table) == set(fields) and all(type(table[name]) is of for name, of in fields.items()):
            made: KernelShape = kind(**table)
            return made
    raise error(f"{where}: unknown shape {dict(table)!r}", expected="the fields of one kernel's shape")
