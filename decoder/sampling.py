"""The choice of a token from a row of logits: greedy, or a seeded draw.

A draw at index i of the sequence adds Gumbel noise to logits / temperature and takes the maximum (Gumbel 1954; "Gumbel-max
trick"), which samples the softmax exactly. The noise of index i depends on (seed, i) alone, so AR, SD and SSD draw the same token
from the same logits. Speculation keeps a drafted token that equals the target's draw. For a draft d that has probability p(d);
otherwise the draw is distributed as p without d. This is rejection sampling (Leviathan, Kalman, Matias 2023) with a drafter that
puts all its mass on d. So sampling is lossless, and identical in AR, SD and SSD. The cost: a drafter that draws from q with the
same noise is right with probability (1 - TV) / (1 + TV) at least, while rejection sampling on q reaches 1 - TV. TV is the total
variation distance of target p and draft q (Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant
speculative decoding").
"""

from dataclasses import dataclass

import numpy as np

from .errors import NumericsError

SEEDS = 2**64  # number of different seeds, 0..SEEDS - 1: the size of the generator's key


def no_answer(whose: str = "model") -> NumericsError:
    """The error of a row of logits whose largest one is NaN or infinite."""
    return NumericsError(f"the {whose}'s logits hold NaN or infinity", expected="finite logits",
                         action="check the weights; try another recipe")


@dataclass(frozen=True)
class Chooser:
    """temperature: 0 is argmax of the logits, the lowest id on ties, and ignores the other values. seed: 0..2^64 - 1.

    A token may be drawn if it is among the top_k most likely ones (0: any number), in the smallest set whose probability reaches
    top_p, and at least min_p times as likely as the most likely one; each judged by the whole softmax at this temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def scores(self, logits: np.ndarray, index: int) -> np.ndarray:
        """The values [vocab_size] whose maximum is chosen at sequence index `index`. logits [vocab_size]: fp32.

        Raises:
            NumericsError: the largest logit is NaN or infinite.
        """
        if not np.isfinite(logits.max()):
            raise no_answer()
        if self.greedy:
            return logits
        scaled = logits.astype(np.float64) / self.temperature
        scaled = np.where(self._kept(scaled), scaled, -np.inf)
        key = np.array([self.seed, index], dtype=np.uint64)
        uniform = np.random.Generator(np.random.Philox(key=key)).random(logits.shape[0])
        with np.errstate(divide="ignore"):
            return scaled - np.log(-np.log(uniform))

    def _kept(self, scaled: np.ndarray) -> np.ndarray:
        """The tokens that may be drawn, as a mask [vocab_size]; the most likely one is always among them."""
        kept = np.ones(scaled.shape[0], dtype=bool) if self.top_p == 1 else nucleus(scaled, self.top_p)
        if 0 < self.top_k < scaled.shape[0]:
            best = np.zeros_like(kept)
            best[most_likely(scaled, self.top_k)] = True
            kept &= best
        if self.min_p > 0:
            kept &= scaled >= scaled.max() + np.log(self.min_p)
        return kept

    def choose(self, logits: np.ndarray, index: int) -> int:
        """The token at sequence index `index`, the lowest id on ties. Raises NumericsError as `scores`."""
        return int(np.argmax(self.scores(logits, index)))


def nucleus(scaled: np.ndarray, top_p: float) -> np.ndarray:
    """A mask [vocab_size] of the smallest set of most likely tokens with probability top_p; at least one token, lower ids first
    among equals. scaled [vocab_size]: logits / temperature."""
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), top_p * p.sum())) + 1
    mask = np.zeros(p.shape[0], dtype=bool)
    mask[order[:count]] = True
    return mask


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[vocab_size] in fp64 of one row of logits [vocab_size]."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    return shifted - np.log(np.exp(shifted).sum())


def most_likely(values: np.ndarray, count: int) -> list[int]:
    """The ids of the `count` largest values, largest first, lower ids first among equals."""
    count = min(count, values.shape[0])
    threshold = np.partition(values, -count)[-count]
    candidates = np.flatnonzero(values >= threshold)
    order = candidates[np.argsort(-values[candidates], kind="stable")]
    return [int(i) for i in order[:count]]
