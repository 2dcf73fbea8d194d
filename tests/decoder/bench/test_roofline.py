"""The equations give the figures that were measured on B300 and H200 (Qwen2.5-7B, FP8 with a bf16 head)."""

import pytest
from tune_kernels.decoder.bench.roofline import Times, best, floor_ms, predict, step_bytes, tokens_per_round
from tune_kernels.decoder.errors import RequestError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.model import load_model_shape

FP8, BF16 = (load_recipe(name).precision for name in ("fp8-v1", "bf16"))
QWEN = load_model_shape("qwen2.5-7b")


def test_the_floor_of_a_step() -> None:
    """7.6 GB: 0.95 ms and 1,050 tokens/s at 8 TB/s; 1.73 ms and 578 tokens/s at 4.4 TB/s."""
    read = step_bytes(QWEN, FP8)
    assert sum(read.values()) / 1e9 == pytest.approx(7.6, abs=0.05)
    assert floor_ms(read, 8) == pytest.approx(0.95, abs=0.005)
    assert 1e3 / floor_ms(read, 8) == pytest.approx(1050, rel=0.005)
    assert floor_ms(read, 4.4) == pytest.approx(1.73, abs=0.005)
    assert 1e3 / floor_ms(read, 4.4) == pytest.approx(578, rel=0.005)


def test_the_head_and_the_cache() -> None:
    """The bf16 head is 0.26 ms of an H200's step (measured with cuBLAS at 0.95 of the ceiling); 57,344 B of keys and
    values a token, 7.5 GB for 131,072."""
    head = step_bytes(QWEN, FP8)["lm_head"]
    assert head / 4.4e12 / 0.95 * 1e3 == pytest.approx(0.26, abs=0.005)
    assert step_bytes(QWEN, FP8, 1)["kv_cache"] == 57_344
    assert step_bytes(QWEN, FP8, 131_072)["kv_cache"] / 1e9 == pytest.approx(7.5, abs=0.05)
    assert step_bytes(QWEN, BF16)["projections"] == pytest.approx(2 * step_bytes(QWEN, FP8)["projections"], rel=0.01)


def test_speculation() -> None:
    """B300, EAGLE-3, K = 4: a round of 3.67 ms at tau 2.54 is 692 tokens/s (697 were measured); 0.75 ms of it drafting
    and coordination, so hiding all of it could give SSD at most 3.67 / 2.92 = 1.26 times SD."""
    p = predict(Times(t_d=0.75 / 4, t_v=3.67 - 0.75), 4, 2.54, 1.0)
    assert p.sd == pytest.approx(697, rel=0.01)
    assert p.ssd_over_sd == pytest.approx(3.67 / 2.92) == p.ssd_ceiling_over_sd
    assert predict(Times(0.2, 3.0, 0.1, 0.05), 4, 2.5, 0.0).ssd < predict(Times(0.2, 3.0, 0.1, 0.05), 4, 2.5, 0.0).sd
    ar = predict(Times(0.1, 2.86), 4, 2.54, 1.0).ar
    assert ar == pytest.approx(350, rel=0.005)  # AR with the two tuned schedules: a step of 2.86 ms


def test_tokens_per_round() -> None:
    assert tokens_per_round(0, 4) == 1
    assert tokens_per_round(1, 4) == 5
    assert tokens_per_round(0.5, 2) == 1.75
    assert tokens_per_round(0.999999, 4) == pytest.approx(5, rel=1e-4)


def test_the_best_draft_length_grows_with_acceptance() -> None:
    lengths = [best([predict(Times(0.15, 1.0), k, tokens_per_round(a, k), 1.0) for k in range(1, 16)]).draft_length
               for a in (0.1, 0.4, 0.6, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] > 6


@pytest.mark.parametrize(("times", "hit"), [(Times(0.1, 0.0), 1), (Times(-0.1, 1.0), 1), (Times(0.1, 1.0), 1.5)])
def test_impossible_figures_are_refused(times: Times, hit: float) -> None:
    with pytest.raises(RequestError):
        predict(times, 4, 2.0, hit)
