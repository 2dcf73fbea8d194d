"""`bench`: runs that warm up show in no figure, and yet must make AR's tokens."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.bench import bench
from tune_kernels.decoder.on_gpu.graphs import WARM_UP, Graphs
from tune_kernels.decoder.on_gpu.model import TritonModel
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.shapes.model import ModelShape

PROMPTS = tuple(bench.Prompt(name, name, text) for name, text in (("code", "def f(x):"), ("prose", "It was")))


@pytest.fixture(scope="module")
def decoder(tiny_shape: ModelShape, recipe_of: Callable[..., Recipe]) -> Decoder:
    return Decoder.load("random:1", model=tiny_shape, recipe=recipe_of("fp32"), capacity=200, drafter="ngram")


def run(decoder: Decoder) -> tuple[list[bench.Run], list[str]]:
    """Two repeats of AR and SD, and the lines that were printed."""
    said: list[str] = []
    chosen = bench.configs(("ar", "sd"), (2,))
    return list(bench.run_all(decoder, bench.BenchPlan(PROMPTS, 2, chosen, 8, None, 2), said.append)), said


def test_nothing_warms_up_on_a_cpu(decoder: Decoder) -> None:
    runs, said = run(decoder)
    assert [r.repeat for r in runs] == [0] * 4 + [1] * 4
    assert said[0].startswith("repeat 1 of 2: code, ar (1 of 8, ")
    assert said[-1].endswith("(8 of 8, 0 s left)")


def test_runs_that_warm_up_are_in_no_figure(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes until each pass comes from its graph."""
    monkeypatch.setattr(decoder.model, "warm_up_repeats", WARM_UP)
    runs, said = run(decoder)
    assert sum(r.repeat < 0 for r in runs) == 4 * WARM_UP
    assert said[0].startswith(f"warming up: code, ar (1 of {8 + 4 * WARM_UP}, ")
    for r in runs:
        if r.repeat < 0:
            r.stats.decode_s = 1e9
    rows = bench.summary(runs)
    assert [row["requests"] for row in rows] == [4, 4]
    assert all(row["tokens_per_s"] > 1 for row in rows)
    assert [row["requests"] for row in bench.summary(runs, "code")] == [2, 2]


def test_a_warm_up_run_with_other_tokens_is_told(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.model, "warm_up_repeats", 1)
    runs, _ = run(decoder)
    assert bench.differing(runs) == []
    for i in (1, 5):
        runs[i] = bench.Run(**{**vars(runs[i]), "same_as_ar": False})
    assert bench.differing(runs) == ["code, sd K=2, warming up", "code, sd K=2"]


@pytest.mark.parametrize(("graphs", "expected"), [(True, WARM_UP), (False, 1)])
def test_every_graph_is_captured_before_anything_is_timed(graphs: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that one request a repeat makes, as a prompt's."""
    model = SimpleNamespace(device=torch.device("cuda"), graphs_enabled=graphs)
    repeats = TritonModel.warm_up_repeats.fget(model)
    assert repeats == expected
    store = Graphs(graphs, torch.device("cpu"))
    store.enabled = graphs
    monkeypatch.setattr(store, "capture", lambda launches: SimpleNamespace(replay=lambda: None))
    for _ in range(repeats - 1):
        store.run("a prompt's pass", lambda: None)
    assert not store.graphs, "one repeat less isn't enough"
    store.run("a prompt's pass", lambda: None)
    assert bool(store.graphs) == graphs
