"""Check 2, reference: are the logits those of Hugging Face's implementation?

Every position of one long context is judged over the tokenizer's ids, by the total variation distance of the two distributions
(half the sum of absolute differences, 0..1) and by the winning token. Cached one-token decoding is compared around every chunk
boundary. The bounds are here, by precision.

Two bf16 implementations differ by their roundings, and that alone can break a bound. Then both are measured against the same
weights in fp64. The check passes only if this decoder is as near to fp64 as Hugging Face's bf16, within MARGIN, in the median and
in the 95th percentile; the result says so. (The single worst position of a few hundred is chance; it is reported.) See
docs/decisions/014-reference-rule.md.

FP8 projections are also judged one by one, on the inputs of Hugging Face's model: there no errors accumulate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..checkpoint.hugging_face import hugging_face_from_tensors
from ..checkpoint.loader import Checkpoint
from ..engine import Decoder
from ..rows import Appended
from .check import CheckResult, result
from .fp8_reference import replace_projections

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARGIN = 1.25  # ratio of two distances from fp64; equally good roundings of a few hundred positions stay below it
PROJECTION_BOUND = 2.0**-7  # of a row's largest output: two bf16 roundings of nearly equal sums
PROJECTION_TOKENS = 64  # positions of the projections' check
AROUND = 3  # positions compared on either side of a chunk boundary, in cached decoding


@dataclass(frozen=True)
class Bounds:
    """top1: least share of positions with the same winner, None for no bound; median, worst: largest total variation; boundary:
    largest ratio of a later chunk's median total variation to the first chunk's, if it is above `median`."""

    top1: float | None
    median: float
    worst: float
    boundary: float


BOUNDS = {
    "fp32": Bounds(1.0, 1e-4, 1e-4, 2.0),
    "bf16": Bounds(None, 0.01, 0.05, 2.0),
    "e4m3": Bounds(None, 0.02, 0.15, 2.0),
}


def hugging_face_model(checkpoint: Checkpoint, dtype: torch.dtype) -> "PreTrainedModel":
    """Hugging Face's model of a checkpoint, loaded from its file by Hugging Face. Random weights and weights stored as FP8 are
    copied."""
    from transformers import AutoModelForCausalLM

    path = checkpoint.path
    if path is not None and not checkpoint.config.stores_fp8:
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True, **where).eval()
    return hugging_face_from_tensors(checkpoint).to(dtype).eval()


def reference_model(checkpoint: Checkpoint, linear: str) -> "PreTrainedModel":
    """The reference for a recipe: Hugging Face's model in the recipe's type, FP8 projections replaced. linear: the precision of
    the recipe's projections."""
    if linear == "bf16":
        return hugging_face_model(checkpoint, torch.bfloat16)
    model = hugging_face_model(checkpoint, torch.float32)
    if linear == "e4m3":  # from the checkpoint's weights, not from their bf16 roundings
        model = replace_projections(model, checkpoint.config.stores_fp8).to(torch.bfloat16)
    return model


def in_fp64(model: "PreTrainedModel") -> "PreTrainedModel":
    """Converts the bf16 reference model to fp64 in place. Hugging Face still computes norms and RoPE in fp32."""
    return model.double()


def reference_probabilities(model: "PreTrainedModel", tokens: list[int], limit: int) -> np.ndarray:
    """The distributions [positions, limit] in fp64, from one pass over all positions. limit: the tokenizer's ids."""
    with torch.inference_mode():
        return probabilities(model(torch.tensor([tokens])).logits[0, :, :limit])


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The total variation distance [positions], 0..1, of p and q [positions, V]."""
    distance: np.ndarray = 0.5 * np.abs(p - q).sum(-1)
    return distance


def probabilities(logits: torch.Tensor) -> np.ndarray:
    """The softmax [rows, V] in fp64."""
    return torch.softmax(logits.double(), dim=-1).cpu().numpy()


def compare_with_reference(decoder: Decoder, model: "PreTrainedModel", tokens: list[int], linear: str) -> Iterator[CheckResult]:
    """The reference checks on one context that crosses chunk boundaries.

    decoder: under the recipe to judge; model: from `reference_model`, which this function may convert to fp64; tokens: the
    context; linear: the precision of the recipe's projections.
    """
    limit, chunk, bounds = decoder.model.vocab_limit, decoder.recipe.kv_chunk, BOUNDS[linear]
    if linear == "e4m3":
        yield compare_projections(decoder, model, tokens[:PROJECTION_TOKENS])
    q = reference_probabilities(model, tokens, limit)
    cache = decoder.model.new_cache(len(tokens))
    decoded = decoder.model.logits(decoder.model.forward(tokens, Appended(cache, len(tokens))).final)[:, :limit]
    paths = {"decode": probabilities(decoded)}
    if not decoder.model.prefill_is_decode:
        paths["prefill"] = probabilities(prompt_logits(decoder, tokens)[:, :limit])
    exact: np.ndarray | None = None
    for name, p in paths.items():
        distance = total_variation(p, q)
        worst, median = int(distance.argmax()), float(np.median(distance))
        within = bool(median <= bounds.median and distance[worst] <= bounds.worst)
        yield result("reference", f"total variation, {name}", within or linear != "fp32",
                     f"median {median:.2e} (bound {bounds.median:g}), worst {distance[worst]:.2e} at position {worst} "
                     f"(bound {bounds.worst:g})" + ("" if within else ": beyond the bound; judged against fp64 next"),
                     positions=len(tokens), median_tv=median, worst_tv=distance[worst], worst_position=worst)
        if not within and linear != "fp32":
            exact = reference_probabilities(in_fp64(model), tokens, limit) if exact is None else exact
            yield _rounding_alone(name, p, q, exact)
        differ = np.flatnonzero(p.argmax(-1) != q.argmax(-1))
        share = 1 - len(differ) / len(tokens)
        yield result("reference", f"top-1, {name}", bounds.top1 is None or share >= bounds.top1,
                     f"{share:.4f} of positions" + (f", first difference at {differ[0]}" if len(differ) else ""), top1=share)
        yield from _boundaries(name, distance, chunk, bounds)
    yield _decoded(decoder, tokens, decoded)


def prompt_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """The logits [positions, V] of prefill, pass by pass."""
    model, found = decoder.model, []
    cache = model.new_cache(len(tokens))
    for start in range(0, len(tokens), model.prefill_rows):
        part = tokens[start:start + model.prefill_rows]
        found.append(model.logits(model.prefill(part, Appended(cache, len(part))).final))
    return torch.cat(found)


def compare_projections(decoder: Decoder, model: "PreTrainedModel", tokens: list[int]) -> CheckResult:
    """Compares every FP8 projection of every layer, on the inputs of the reference model."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0][0], y[0])}))
             for name, module in model.named_modules() if name.endswith("_proj")]
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    worst, where, count = 0.0, "", 0
    for index in range(decoder.model.shape.num_layers):
        for kernel, names in (("qkv", ("self_attn.q", "self_attn.k", "self_attn.v")), ("o", ("self_attn.o",)),
                              ("gate_up", ("mlp.gate", "mlp.up")), ("down", ("mlp.down",))):
            parts = [seen[f"model.layers.{index}.{name}_proj"] for name in names]
            expected = torch.cat([y for _, y in parts], dim=-1).float()
            ours = decoder.model.project(index, kernel, parts[0][0]).float().cpu()
            error = (ours - expected).abs().amax(-1) / expected.abs().amax(-1)
            count += 1
            if float(error.max()) > worst:
                worst, where = float(error.max()), f"layer {index}, {'+'.join(names)}, row {int(error.argmax())}"
    return result("reference", "FP8 projections one by one", worst <= PROJECTION_BOUND,
                  f"{count} projections on {len(tokens)} rows: worst {worst:.2e} of the row's largest output at {where} "
                  f"(bound {PROJECTION_BOUND:.2e})", worst=worst, projections=count)


def _rounding_alone(name: str, ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> CheckResult:
    """Checks that this decoder is as near to fp64 as Hugging Face's low-precision model."""
    far, their_far = total_variation(ours, exact), total_variation(theirs, exact)
    (median, high), (their_median, their_high) = (np.quantile(x, (0.5, 0.95)) for x in (far, their_far))
    passed = median <= MARGIN * their_median and high <= MARGIN * their_high
    return result("reference", f"total variation from fp64, {name}", passed,
                  f"median {median:.2e}, 95th percentile {high:.2e}, worst {far.max():.2e} at position {far.argmax()}; "
                  f"Hugging Face's {their_median:.2e}, {their_high:.2e}, {their_far.max():.2e}: "
                  + ("rounding alone breaks the bound" if passed else "more than rounding"),
                  median=median, high=high, worst=far.max(), reference_median=their_median, reference_high=their_high,
                  reference_worst=their_far.max())


def _boundaries(name: str, distance: np.ndarray, chunk: int, bounds: Bounds) -> Iterator[CheckResult]:
    """Checks later chunks against the first: the distance must not grow at or after a boundary."""
    medians = [float(np.median(distance[start:start + chunk])) for start in range(0, len(distance), chunk)]
    if len(medians) > 1:
        at = int(np.argmax(medians[1:])) + 1
        limit = max(bounds.boundary * medians[0], bounds.median)
        yield result("reference", f"positions after a chunk boundary, {name}", medians[at] <= limit,
                     f"median {medians[at]:.2e} in chunk {at}, {medians[0]:.2e} in chunk 0 (at most {limit:.2e})",
                     later=medians[at], first=medians[0], chunk=at)


def _decoded(decoder: Decoder, tokens: list[int], decoded: torch.Tensor) -> CheckResult:
    """Checks that cached decoding, one token at a time around every boundary, gives the bits of a pass of many rows."""
    chunk, model = decoder.recipe.kv_chunk, decoder.model
    cache = model.new_cache(len(tokens))
    fed, compared = 0, 0
    for boundary in range(chunk, len(tokens), chunk):
        first = max(boundary - AROUND, fed)
        if first > fed:
            model.forward(tokens[fed:first], Appended(cache, first - fed))
        for at in range(first, min(boundary + AROUND, len(tokens))):
            row = model.logits(model.forward(tokens[at:at + 1], Appended(cache, 1)).final)[0, :decoded.shape[1]]
            compared += 1
            if not torch.equal(row, decoded[at]):
                return result("reference", "cached decoding", False, f"position {at} differs from a pass of many rows")
            fed = at + 1
    return result("reference", "cached decoding", compared > 0, f"{compared} positions around chunk boundaries: the bits of "
                  "a pass of many rows" if compared else "the context crosses no chunk boundary", positions=compared)
