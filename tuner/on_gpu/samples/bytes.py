"""Bytes that a launch reads, and the sizes of timed launches."""

from ....shapes.model import AttentionShape, CertifiedHeadShape, HeadShape, KernelShape, LinearShape, MergeShape

OCCUPANCIES = (128, 2048)  # tokens in the cache of timed launches of attention and merge, in turns
TIMED_ROWS = 5  # of a timed launch: a verification of 4 draft tokens


def read_bytes(shape: KernelShape, chunk: int, occupancies: tuple[int, ...] = OCCUPANCIES) -> float:
    """Bytes of weights, cache or partials that a timed launch must read. chunk: keys per partial, for merges."""
    if isinstance(shape, LinearShape | HeadShape):
        return float(shape.N * shape.K * (1 if shape.dtype == "e4m3" else 2))
    if isinstance(shape, CertifiedHeadShape):
        return float(shape.N * shape.K)  # the int8 copy; of the rest only the ids that can win are read
    if isinstance(shape, AttentionShape):
        return sum(occupancies) / len(occupancies) * shape.num_kv_heads * shape.head_dim * 4.0
    assert isinstance(shape, MergeShape)
    used = sum(n // chunk + 1 for n in occupancies if n >= chunk) / len(occupancies)
    return max(used, 1.0) * TIMED_ROWS * shape.num_heads * (shape.head_dim + 2) * 4.0
