"""EAGLE-3: checkpoints written here in the published layouts, against an implementation of its own in plain torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reader import PlainDrafter
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafters import eagle3_checkpoint as eagle3_loader
from tune_kernels.decoder.drafters.eagle3 import Eagle3Drafter
from tune_kernels.decoder.drafters.eagle3_config import feature_layers
from tune_kernels.decoder.errors import LoadError
from tune_kernels.decoder.rows import Appended
from tune_kernels.schedules.recipe import Recipe

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, DRAFT_VOCABULARY, VOCABULARY = 64, 4, 2, 16, 80, 90, 272
LAYERS = 8
PROMPT = "eagle"


def tensors_of(seed: int = 5, own_hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * size[-1] ** -0.5

    h = own_hidden
    tensors = {
        "fc.weight": random(h, 3 * HIDDEN), "lm_head.weight": random(DRAFT_VOCABULARY, h) * 3,
        "midlayer.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, 2 * h),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * h),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * h),
        "midlayer.self_attn.o_proj.weight": random(h, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(MIDDLE, h), "midlayer.mlp.up_proj.weight": random(MIDDLE, h),
        "midlayer.mlp.down_proj.weight": random(h, MIDDLE)}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(h, generator=generator)
    ids = torch.randperm(256, generator=generator)[:DRAFT_VOCABULARY].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCABULARY)
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
    tensors["t2d"][ids] = True
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], spelling: str = "midlayer", binary: bool = False,
          **changes: Any) -> Path:
    """A drafter's folder. The card says 3 KV heads, which is wrong, as published cards are."""
    folder.mkdir(parents=True)
    layer = {"hidden_size": tensors["fc.weight"].shape[0], "intermediate_size": MIDDLE, "num_attention_heads": HEADS,
             "num_key_value_heads": 3, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
             "vocab_size": VOCABULARY, "hidden_act": "silu"}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY}
    if spelling == "midlayer":
        config |= layer
    else:
        config["transformer_layer_config"] = layer
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config | changes))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target_folder(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def load(target_folder: Path, recipe_of: Callable[..., Recipe]) -> Callable[..., Decoder]:
    return lambda folder, recipe="fp32", **o: Decoder.load(str(target_folder), recipe=recipe_of(recipe),
                                                           drafter=str(folder), **o)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def plain(tensors: dict[str, torch.Tensor], embedding: torch.Tensor, theta: float = 10000.0) -> PlainDrafter:
    """The independent implementation."""
    return PlainDrafter(tensors, embedding, HEAD_DIM, 1e-5, theta)


def hugging_face_features(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Residual stream after layers 1, L // 2 - 1, L - 4, from transformers; hidden_states[i] is the input of layer
    i."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in (2, LAYERS // 2, LAYERS - 3)], -1)


@pytest.mark.parametrize(("spelling", "binary"), [("midlayer", False), ("midlayer", True), ("layers.0", False)])
def test_logits_are_the_independent_ones(spelling: str, binary: bool, load: Callable[..., Decoder], target_folder: Path,
                                         tmp_path: Path) -> None:
    """Both spellings, both files; KV heads from the tensors; features as transformers has them."""
    tensors = tensors_of()
    decoder = load(write(tmp_path / "d", tensors, spelling, binary))
    drafter = decoder.drafter
    tokens = decoder.tokenizer.encode("The logits of every entry.")
    features = hugging_face_features(target_folder, tokens)
    cache = decoder.model.new_cache(64)
    ours = decoder.model.forward(tokens, Appended(cache, len(tokens)), drafter.feature_layers).features
    assert torch.allclose(ours, features, atol=1e-4, rtol=1e-4)
    step = drafter.model.forward(tokens[1:], drafter.model.reduce(features[:-1]), Appended(drafter.cache, len(tokens) - 1))
    logits = drafter.model.logits(step.final)
    embedding = decoder.model.embedding
    for at in (1, 5, 15, 16, 17, len(tokens) - 1):
        rows = features[:at].double() @ tensors["fc.weight"].double().T
        expected, feature = plain(tensors, embedding).step(tokens[1:at + 1], rows)
        assert torch.allclose(logits[at - 1].double(), expected, atol=1e-4, rtol=1e-4)
        assert torch.allclose(step.feature[at - 1].double(), feature, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8-v1"])
def test_the_same_tokens_in_every_mode(recipe: str, load: Callable[..., Decoder], tmp_path: Path) -> None:
    decoder = load(write(tmp_path / "d", tensors_of()), recipe)
    for prompt in ("a", "a longer prompt that crosses a chunk"):
        runs = [decoder.generate(prompt, mode, max_new_tokens=40, ignore_eos=True) for mode in ("ar", "sd", "ssd")]
        assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
        sampled = [decoder.generate(prompt, mode, max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=1).token_ids
                   for mode in ("ar", "sd", "ssd")]
        assert sampled[0] == sampled[1] == sampled[2]


def guided(decoder: Decoder, tensors: dict[str, torch.Tensor], folder: Path, mode: str, right: int,
           monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Runs a request whose drafts are overwritten from the recorded AR run, `right` tokens right a round, so that
    entries are accepted; compares every draft that the drafter really made with the independent one. (drafts
    compared, hits)."""
    ids = decoder.tokenizer.encode(PROMPT)
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=40, ignore_eos=True).token_ids
    whole = ids + ar
    features = hugging_face_features(folder, whole)
    real, compared = Eagle3Drafter.draft, []

    def draft(self: Eagle3Drafter, tokens: list[int], length: int) -> list[int]:
        made = real(self, tokens, length)
        expected = plain(tensors, decoder.model.embedding).draft(tokens, features[:len(tokens) - 1], length)
        compared.append((made, expected))
        return made

    monkeypatch.setattr(Eagle3Drafter, "draft", draft)
    from tune_kernels.decoder.drafters.scripted import ScriptedDrafter

    inner = decoder.drafter
    decoder.drafter = ScriptedDrafter(whole, [right, 1, 4, 0], 256, hits=[True, False], inner=inner)
    result = decoder.generate(PROMPT, mode, max_new_tokens=40, ignore_eos=True)
    decoder.drafter = inner
    assert result.token_ids == ar
    assert result.stats.drafter_faults == 0
    for made, expected in compared:
        assert made == expected
    return len(compared), result.stats.branch_hits


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("right", range(5))
def test_every_draft_stands_on_the_targets_features(mode: str, right: int, load: Callable[..., Decoder], tmp_path: Path,
                                                    target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any accepted count, and after served branches, each draft is the one that
    the independent implementation computes afresh from the target's features."""
    tensors = tensors_of()
    decoder = load(write(tmp_path / "d", tensors))
    compared, hits = guided(decoder, tensors, target_folder, mode, right, monkeypatch)
    assert compared >= 5
    assert (hits > 0) == (mode == "ssd")


def test_branches_start_from_the_drafters_own_features(load: Callable[..., Decoder], tmp_path: Path,
                                                       target_folder: Path) -> None:
    """Each branch equals the independent computation on own features from the draft on."""
    tensors = tensors_of()
    decoder = load(write(tmp_path / "d", tensors))
    drafter, ids = decoder.drafter, decoder.tokenizer.encode("branches of an eagle")
    features = hugging_face_features(target_folder, ids)
    drafter.start(ids, features[:-1], drafter.chooser)
    draft = drafter.draft(ids, 3)
    ready = drafter.prepare(ids, draft, 6, 3)
    assert len(ready) == 6
    entries, rows = list(ids[1:]), features[:-1].double() @ tensors["fc.weight"].double().T
    walks = []
    for token in [*draft, None]:
        walks.append((list(entries), rows))
        _, feature = plain(tensors, decoder.model.embedding).step(entries, rows)
        if token is not None:
            entries, rows = [*entries, token], torch.cat([rows, feature[None]])
    for (count, token), made in ready.items():
        entries, rows = walks[count]
        expected, fed = [], token
        for _ in range(3):
            _, feature = plain(tensors, decoder.model.embedding).step(entries, rows)
            entries, rows = [*entries, fed], torch.cat([rows, feature[None]])
            logits, _ = plain(tensors, decoder.model.embedding).step(entries, rows)
            best = int(logits.argmax())
            fed = best + int(tensors["d2t"][best])
            expected.append(fed)
        assert made == expected, (count, token)


def test_an_embedding_and_a_rope_of_its_own(load: Callable[..., Decoder], tmp_path: Path, target_folder: Path) -> None:
    """The drafter's own embedding and its own RoPE base win, also with another hidden size."""
    tensors = tensors_of(own_hidden=48)
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, 48, generator=torch.Generator().manual_seed(1))
    decoder = load(write(tmp_path / "d", tensors, rope_theta=500.0))
    ids = decoder.tokenizer.encode("own embedding, own base")
    features = hugging_face_features(target_folder, ids)
    decoder.drafter.start(ids, features[:-1], decoder.drafter.chooser)
    expected = plain(tensors, tensors["embed_tokens.weight"], 500.0).draft(ids, features[:-1], 4)
    assert decoder.drafter.draft(ids, 4) == expected


def test_the_drafters_rope_scaling_is_honoured(load: Callable[..., Decoder], tmp_path: Path) -> None:
    """Scaled frequencies differ from plain ones; an unknown kind is refused."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    plain = load(write(tmp_path / "plain", tensors_of())).drafter.model.rope
    scaled = load(write(tmp_path / "scaled", tensors_of(), rope_scaling=scaling)).drafter.model.rope
    assert not torch.equal(plain.tables[0], scaled.tables[0])
    with pytest.raises(LoadError, match="longrope"):
        load(write(tmp_path / "long", tensors_of(), rope_scaling={"rope_type": "longrope"}))


def change(**changes: Any) -> dict[str, Any]:
    """Tensors with changes; None takes one out."""
    tensors = tensors_of() | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def as_ids(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"d2t": tensors["d2t"] + torch.arange(DRAFT_VOCABULARY)}


@pytest.mark.parametrize(("tensors", "config", "message"), [
    (change(norm__weight=None), {}, "norm.weight is missing"),
    (change(extra__weight=torch.ones(3)), {}, "extra.weight isn't part of"),
    (change(d2t=None), {}, "no d2t"),
    (as_ids(tensors_of()), {}, "d2t|t2d"),
    (change(t2d=torch.ones(VOCABULARY, dtype=torch.bool)), {}, "t2d marks other ids"),
    (tensors_of(), {"fc_norm": True}, "fc_norm is True: a norm of fc's inputs is not supported"),
    (tensors_of(), {"norm_sideways": True}, "unknown key norm_sideways"),
    (tensors_of(), {"anything": 0}, "unknown key anything"),
    (tensors_of(), {"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "in_first_layer is False"),
    (tensors_of(), {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
    (tensors_of(), {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
    (tensors_of(), {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
    (tensors_of(), {"eagle_config": {"sideways": False}}, "eagle_config: unknown key sideways"),
    (tensors_of(), {"use_sliding_window": True}, "use_sliding_window is True"),
    (tensors_of(), {"partial_rotary_factor": 0.5}, "partial rotary"),
    (tensors_of(), {"quantization_config": {"bits": 4}}, "quantised already"),
    (tensors_of(), {"num_hidden_layers": 2}, "more than one layer"),
    (tensors_of(), {"rope_theta": 500.0, "rope_scaling": {"rope_theta": 1e4}}, "rope_theta is 500 but"),
    (tensors_of(), {"head_dim": 8}, "4 heads of 8, and .*q_proj.weight has 64 rows"),
    (tensors_of(), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 8]}}, r"is \[3, 4, 8\]"),
    (tensors_of(), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, "4", 6]}}, "3 layer ids"),
    (tensors_of(), {"target_hidden_size": 128}, "hidden size of 128"),
    (tensors_of(), {"vocab_size": 100}, "target vocabulary of 100"),
    (tensors_of(), {"vocab_size": 1000}, r"t2d is \[272\]"),
    (tensors_of(own_hidden=48), {}, "embedding of its own|no embed_tokens"),
])
def test_what_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str,
                                      load: Callable[..., Decoder], tmp_path: Path) -> None:
    """F6: every mistake that would otherwise show only as low acceptance."""
    with pytest.raises(LoadError, match=message):
        load(write(tmp_path / "d", tensors, **config))


def test_layer_ids_of_both_conventions() -> None:
    """Qwen2.5-7B, 28 layers: outputs of 1, 13, 24 in either spelling. F6: other ids are used as the configuration gives them."""
    assert feature_layers(None, 28, "") == feature_layers((1, 13, 24), 28, "") == feature_layers((2, 14, 25), 28, "")
    assert feature_layers((1, 17, 33), 36, "") == (1, 17, 33)
    assert feature_layers((0, 2, 3), 4, "") == (0, 2, 3)
    assert feature_layers((1, 13, 24), 28, "", read=True) == (1, 13, 24) == feature_layers((2, 14, 25), 28, "", read=True)
    assert feature_layers((2, 18, 34), 36, "", read=True) == (1, 17, 33)
    with pytest.raises(LoadError, match="layer 0 reads the embedding"):
        feature_layers((0, 17, 33), 36, "", read=True)
    for ids in ((1, 13), (1, 2, 3, 4), (13, 1, 24), (1, 1, 24), (1, 13, 28), (-1, 13, 24)):
        with pytest.raises(LoadError):
            feature_layers(ids, 28, "")
    with pytest.raises(LoadError, match="at least 7 layers"):
        feature_layers(None, 5, "")


@pytest.mark.parametrize("positions", [24, 40, 41, 63])
def test_a_head_of_fewer_positions_stops_drafting_there(positions: int, load: Callable[..., Decoder], tmp_path: Path) -> None:
    """F6: the target keeps its context, and its tokens; before the head's last position drafts are made, after it none."""
    whole, short = (load(write(tmp_path / name, tensors_of(), max_position_embeddings=most), capacity=96)
                    for name, most in (("whole", 512), ("short", positions)))
    assert short.capacity == whole.capacity and short.drafter.max_position == positions
    ids = whole.tokenizer.encode("some way")
    for mode in ("sd", "ssd"):
        runs = [d.generate(ids, mode, max_new_tokens=60, draft_length=4, ignore_eos=True) for d in (whole, short)]
        ar = short.generate(ids, "ar", max_new_tokens=60, ignore_eos=True)
        assert runs[0].token_ids == runs[1].token_ids == ar.token_ids
        assert 0 < runs[1].stats.drafted < runs[0].stats.drafted
    long = short.tokenizer.encode("a prompt that the head has no positions for, though its target has " * 2)[:positions + 5]
    assert short.generate(long, "sd", max_new_tokens=8, ignore_eos=True).stats.drafted == 0
    again = short.generate(ids, "sd", max_new_tokens=8, ignore_eos=True)
    assert again.stats.drafted > 0, "the next request begins afresh"


def test_layers_of_the_configurations_own_are_read(load: Callable[..., Decoder], tmp_path: Path) -> None:
    """F6: as layers that give a feature in eagle_config, as layers that read it at the top level."""
    inner = write(tmp_path / "inner", tensors_of(), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]})
    outer = write(tmp_path / "outer", tensors_of(), "layers.0", eagle_aux_hidden_state_layer_ids=[1, 4, 7])
    for folder in (inner, outer):
        assert load(folder).drafter.feature_layers == (0, 3, 6)


def test_switches_that_ask_for_the_plain_layer_load(load: Callable[..., Decoder], tmp_path: Path) -> None:
    """F6: NVIDIA's names at the values that this layer has, in either place."""
    plain = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
             "use_mtp_layernorm": False, "parallel_draft_step": 1, "has_lm_head": True, "eagle_decoder_type": "llama"}
    load(write(tmp_path / "inner", tensors_of(), eagle_config=plain))
    load(write(tmp_path / "outer", tensors_of(), num_hidden_layers=1, norm_before_fc=False, **plain))


def feature_layer_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The layers that read the features are taken for those that give them."""
    layers = eagle3_loader.feature_layers
    patch.setattr(eagle3_loader, "feature_layers", lambda *a: tuple(i + 1 for i in layers(*a)))


def d2t_taken_for_ids(patch: pytest.MonkeyPatch) -> None:
    """The offset itself is taken for the target's id."""
    ids = eagle3_loader.target_ids
    patch.setattr(eagle3_loader, "target_ids", lambda *a: ids(*a) - torch.arange(DRAFT_VOCABULARY))


def features_not_overwritten(patch: pytest.MonkeyPatch) -> None:
    """Accepted entries keep the drafter's own features."""
    def accept(self: Eagle3Drafter, outcome: Any) -> None:
        kept = min(self.cache.cursor, outcome.base - 1 + outcome.accepted)
        self.cache.rollback(kept)
        self.pending = self.model.reduce(outcome.features)[kept - (outcome.base - 1):]
    patch.setattr(Eagle3Drafter, "accept", accept)


def rewound_one_too_far(patch: pytest.MonkeyPatch) -> None:
    """One entry is dropped that the next ones need."""
    accept = Eagle3Drafter.accept

    def wrong(self: Eagle3Drafter, outcome: Any) -> None:
        accept(self, outcome)
        self.cache.rollback(max(self.cache.cursor - 1, 0))
        self.pending = torch.cat([self.pending[:1], self.pending])
    patch.setattr(Eagle3Drafter, "accept", wrong)


@pytest.mark.parametrize("mutant", [feature_layer_off_by_one, d2t_taken_for_ids, features_not_overwritten,
                                    rewound_one_too_far], ids=lambda m: m.__name__)
def test_a_mutant_shows_in_the_drafts_and_not_in_the_tokens(mutant: Callable[..., None], load: Callable[..., Decoder],
                                                            tmp_path: Path, target_folder: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs that only lower acceptance: agreement stays green, the independent drafts catch them."""
    mutant(monkeypatch)
    tensors = tensors_of()
    decoder = load(write(tmp_path / "d", tensors))
    runs = [decoder.generate(PROMPT, mode, max_new_tokens=30, ignore_eos=True).token_ids for mode in ("ar", "sd", "ssd")]
    assert runs[0] == runs[1] == runs[2]
    with pytest.raises(AssertionError):
        guided(decoder, tensors, target_folder, "sd", 3, monkeypatch)


def test_the_residual_may_be_the_normed_feature(load: Callable[..., Decoder], tmp_path: Path) -> None:
    """norm_before_residual: with o and down at zero the layer gives its residual, the feature or the normed feature."""
    tensors = tensors_of()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"] = torch.zeros_like(tensors[f"midlayer.{name}.weight"])
    features = torch.randn(3, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    for on in (False, True):
        drafter = load(write(tmp_path / str(on), tensors, norm_before_residual=on)).drafter
        reduced = drafter.model.reduce(features)
        step = drafter.model.forward([1, 2, 3], reduced, Appended(drafter.cache, 3))
        expected = norm(reduced, tensors["midlayer.hidden_norm.weight"]) if on else reduced
        assert torch.allclose(step.feature, expected, atol=1e-5)


def test_activations_that_overflow_draft_nothing(load: Callable[..., Decoder], tmp_path: Path) -> None:
    """F3: gate and up x 1e25 are finite weights with infinite activations: AR's tokens, no draft, counted and named."""
    tensors = tensors_of()
    for name in ("gate_proj", "up_proj"):
        tensors[f"midlayer.mlp.{name}.weight"] = tensors[f"midlayer.mlp.{name}.weight"] * 1e25
    decoder = load(write(tmp_path / "d", tensors))
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    for options in ({}, sampled):
        ar = decoder.generate(PROMPT, "ar", max_new_tokens=10, ignore_eos=True, **options)
        for mode in ("sd", "ssd"):
            result = decoder.generate(PROMPT, mode, max_new_tokens=10, ignore_eos=True, **options)
            assert result.token_ids == ar.token_ids
            assert result.stats.drafted == 0 < result.stats.drafter_faults
            assert "drafter eagle3: draft raised NumericsError: the " in result.stats.warnings[-1]
