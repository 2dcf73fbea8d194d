"""Strict loading: tensors and keys that are missing, left over, misshapen or unsupported are refused by name."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.checkpoint.weights import expected_tensors, fingerprint, random_tensors
from tune_kernels.decoder.errors import LoadError
from tune_kernels.shapes.model import ModelShape, load_model_shape

CPU = torch.device("cpu")


def copy(folder: Path, to: Path, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    """A model folder with changes: None removes a tensor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    kept = {**load_file(to / "model.safetensors"), **(tensors or {})}
    save_file({n: t for n, t in kept.items() if t is not None}, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize(("tensors", "message"), [
    ({"model.norm.weight": None}, "model.norm.weight is missing"),
    ({"model.layers.0.extra.weight": torch.ones(2)}, "isn't part of"),
    ({"model.norm.weight": torch.ones(63)}, r"model.norm.weight is \[63\]"),
    ({"model.norm.weight": torch.full((64,), torch.nan)}, "NaN or infinity"),
    ({"lm_head.weight": torch.ones(272, 64)}, "lm_head.weight differs"),
])
def test_tensors_are_checked(tensors: dict[str, Any], message: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        load_checkpoint(str(copy(tiny_folders["llama"], tmp_path / "m", tensors=tensors)), None, CPU)


@pytest.mark.parametrize(("kind", "config", "message"), [
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("llama", {"sliding_window": 128}, "sliding-window"),
    ("mistral", {"sliding_window": 4096}, "sliding-window"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3", {"attention_bias": True}, "bias in every attention projection"),
    ("llama", {"num_local_experts": 8}, "mixture of experts"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_bias": True}, "bias in every attention projection"),
    ("llama", {"mlp_bias": True}, "bias in the MLP"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method: is 'gptq'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor: missing"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial rotary"),
    ("llama", {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    ("llama", {"layer_types": ["sliding_attention"] * 5}, "other than full attention"),
    ("llama", {"rope_interleaved": True}, "rotation of neighbouring values"),
    ("llama", {"residual_multiplier": 0.22}, "unknown key residual_multiplier = 0.22"),
    ("qwen2", {"attn_logit_softcapping": 50.0}, "unknown key attn_logit_softcapping"),
])
def test_unsupported_features_are_refused_by_name(kind: str, config: dict[str, Any], message: str, tmp_path: Path,
                                                  tiny_folders: dict[str, Path]) -> None:
    """F6: scaling that depends on the length of a prompt among them; a key that isn't known isn't ignored."""
    with pytest.raises(LoadError, match=message):
        Decoder.load(str(copy(tiny_folders[kind], tmp_path / "m", config)), recipe="fp32")


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "mistral"])
def test_keys_that_transformers_writes_are_known(kind: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Its whole default configuration, and keys of older releases and of published models."""
    from transformers import AutoConfig

    mine = set(json.loads((tiny_folders[kind] / "config.json").read_text()))
    written = {k: v for k, v in AutoConfig.for_model(kind).to_dict().items() if k not in mine and k != "layer_types"}
    published = {"_name_or_path": "x", "torch_dtype": "bfloat16", "is_llama_config": True, "rope_interleaved": False,
                 "transformers.js_config": {}, "use_mrope": False, "max_window_layers": 28, "use_sliding_window": False}
    if kind == "mistral":
        written["sliding_window"] = None
    load_checkpoint(str(copy(tiny_folders[kind], tmp_path / "m", written | published)), None, CPU)


def test_a_mistral_that_names_no_window_is_refused(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers takes 4,096 tokens for it, as the first Mistral had."""
    folder = copy(tiny_folders["mistral"], tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="sliding_window is missing, which means 4,096 tokens"):
        load_checkpoint(str(folder), None, CPU)


@pytest.mark.parametrize(("config", "message"), [
    ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
     r"rope_theta is 500 but rope_parameters\.rope_theta is 10000"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
     "contradicts rope_parameters"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "type": "llama3"}}, "'yarn', and type is 'llama3'"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention: a parameter of plain RoPE"),
])
def test_rope_settings_that_contradict_each_other_are_refused(config: dict[str, Any], message: str, tmp_path: Path,
                                                              tiny_folders: dict[str, Path]) -> None:
    """F7."""
    with pytest.raises(LoadError, match=message):
        load_checkpoint(str(copy(tiny_folders["llama"], tmp_path / "m", config)), None, CPU)


def test_rope_settings_that_agree_load(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    """F7: one value in three places, and in the older spelling alone."""
    yarn = {"factor": 2.0, "original_max_position_embeddings": 64}
    agree = {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **yarn},
             "rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", **yarn}}
    for name, config in (("agree", agree), ("old", agree | {"rope_parameters": None})):
        shape = load_checkpoint(str(copy(tiny_folders["llama"], tmp_path / name, config)), None, CPU).config.shape
        assert shape.rope_theta == 500.0 and shape.rope_scaling == {"rope_type": "yarn", **yarn}


def test_a_position_turns_by_the_same_bits_whatever_the_tables_size() -> None:
    """F7: a table is as long as the cache that it serves."""
    from tune_kernels.decoder.checkpoint.rope import rope_table

    shape = load_model_shape("smollm2-135m")
    small, large = rope_table(shape, 5, CPU), rope_table(shape, 1000, CPU)
    assert len(small[0]) < 1000 <= len(large[0])
    for few, many in zip(small, large):
        assert torch.equal(few, many[:len(few)])


def damaged(data: bytes, damage: str) -> bytes:
    """A safetensors file, damaged in its header or its body."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    first = next(name for name in header if name != "__metadata__")
    whole = {"empty": b"", "cut": data[:len(data) // 2], "no header": struct.pack("<Q", 2**60) + data[8:],
             "no JSON": data[:8] + b"}" * size + body}
    if damage in whole:
        return whole[damage]
    change: dict[str, Any] = {"another type": {"dtype": "Q7"}, "no type": {"dtype": 3}, "a negative size": {"shape": [-1, 64]},
                              "another size": {"shape": [3]}, "places outside": {"data_offsets": [0, 2**40]},
                              "places backwards": {"data_offsets": [64, 0]}}[damage]
    text = json.dumps(header | {first: header[first] | change}).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize("damage", ["empty", "cut", "no header", "no JSON", "another type", "no type", "a negative size",
                                    "another size", "places outside", "places backwards"])
def test_a_malformed_safetensors_file_is_named(damage: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """F24."""
    path = copy(tiny_folders["llama"], tmp_path / "m") / "model.safetensors"
    path.write_bytes(damaged(path.read_bytes(), damage))
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load_checkpoint(str(path.parent), None, CPU)


@pytest.mark.parametrize("index", [
    {"weight_map": ["a", "b"]}, {"weight_map": {"model.norm.weight": 3}}, {}, [], {"weight_map": None},
    {"weight_map": {"model.norm.weight": "../../elsewhere.safetensors"}}, {"weight_map": {"model.norm.weight": ""}}])
def test_an_index_that_is_none_is_named(index: Any, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """F24, F18: nor does it lead out of the folder."""
    folder = copy(tiny_folders["llama"], tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"index\.json"):
        load_checkpoint(str(folder), None, CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_quantised_tensors_are_refused_without_a_word_in_the_configuration(dtype: torch.dtype, tmp_path: Path,
                                                                           tiny_folders: dict[str, Path]) -> None:
    """F24."""
    from safetensors.torch import load_file

    name = "model.layers.0.self_attn.q_proj.weight"
    w = load_file(tiny_folders["llama"] / "model.safetensors")[name]
    folder = copy(tiny_folders["llama"], tmp_path / "m", tensors={name: w.to(dtype)})
    with pytest.raises(LoadError, match=f"q_proj.weight is {dtype}"):
        load_checkpoint(str(folder), None, CPU)


def test_weights_are_named_by_text_or_a_path(tiny_folders: dict[str, Path]) -> None:
    """F24."""
    assert load_checkpoint(tiny_folders["llama"], None, CPU).source == f"path:{tiny_folders['llama'].name}"
    wrong: list[Any] = [3, None, b"folder", "", "a\0b", ["x"]]
    for weights in wrong:
        with pytest.raises(LoadError, match="weights"):
            load_checkpoint(weights, None, CPU)
    with pytest.raises(LoadError, match="no such file"):
        load_checkpoint("x" * 5000, None, CPU)


def test_shards_load_as_one_file_does(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Every tensor once, from the shard that the index names; a shard or a tensor too few is named."""
    from safetensors.torch import load_file, save_file

    whole = load_file(tiny_folders["qwen2"] / "model.safetensors")
    folder = shutil.copytree(tiny_folders["qwen2"], tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, part in parts.items():
        save_file({n: whole[n] for n in part}, folder / name)
    index = {"weight_map": {n: name for name, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    one = load_checkpoint(str(tiny_folders["qwen2"]), None, CPU)
    many = load_checkpoint(str(folder), None, CPU)
    assert fingerprint(one.tensors) == fingerprint(many.tensors)
    index["weight_map"]["ghost"] = "a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="ghost, which is in no shard"):
        load_checkpoint(str(folder), None, CPU)
    (folder / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"b\.safetensors"):
        load_checkpoint(str(folder), None, CPU)


def test_old_checkpoints_with_rope_buffers_load(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(tiny_folders["llama"], tmp_path / "m",
                  tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert not any("inv_freq" in name for name in load_checkpoint(str(folder), None, CPU).tensors)


def test_generation_config(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Several end ids; settings of the model that greedy decoding ignores are named in stats."""
    folder = copy(tiny_folders["llama"], tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [3, 257], "repetition_penalty": 1.1, "do_sample": True}))
    decoder = Decoder.load(str(folder), recipe="fp32")
    assert decoder.eos_ids == {3, 257}
    warnings = decoder.generate("x", max_new_tokens=2).stats.warnings
    assert any("repetition_penalty 1.1" in w for w in warnings)
    assert any("sampling" in w for w in warnings)


@pytest.mark.parametrize(("weights", "options", "message"), [
    ("/nowhere", {}, "no such file"), ("random:x", {"model": "smollm2-135m"}, "random:SEED with a whole number"),
    ("random:0", {}, "need a model shape"), ("smollm2", {"model": "qwen2.5-0.5b"}, "beside weights"),
    ("random:0", {"model": "tiny", "capacity": 9999}, "capacity is 9999"),
    ("random:0", {"model": "tiny", "device": "cuda:9"}, "device 'cuda:9'"),
    ("random:0", {"model": "tiny", "backend": "tritn"}, "unknown backend 'tritn'"),
])
def test_wrong_arguments_say_what_to_do(weights: str, options: dict[str, Any], message: str, tiny_shape: ModelShape) -> None:
    if options.get("model") == "tiny":
        options = options | {"model": tiny_shape}
    with pytest.raises(LoadError, match=message):
        Decoder.load(weights, recipe="fp32", **options)


def test_a_folder_without_a_model(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match=r"no config\.json and 0 \.gguf files"):
        Decoder.load(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF....")
    with pytest.raises(LoadError, match="GGUF"):
        Decoder.load(str(tmp_path))
    folder = shutil.copytree(tiny_folders["llama"], tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    decoder = Decoder.load(str(folder), recipe="fp32")  # F26: without a tokenizer it serves token ids
    assert len(decoder.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-8b", "smollm2-135m"])
def test_shipped_shapes_name_their_tensors(name: str) -> None:
    """The number of tensors of the published checkpoints: 12 a layer with QKV biases, 9 without."""
    shape = load_model_shape(name)
    per_layer = 12 if shape.qkv_bias else 9
    assert len(expected_tensors(shape)) == per_layer * shape.num_layers + (2 if shape.tie_embeddings else 3)


def test_random_tensors_do_not_depend_on_order(tiny_shape: ModelShape) -> None:
    sizes = expected_tensors(tiny_shape)
    forwards, backwards = random_tensors(sizes, 0, CPU), random_tensors(dict(reversed(sizes.items())), 0, CPU)
    assert fingerprint(forwards) == fingerprint(backwards)


def test_the_fingerprint_sees_a_single_bit() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(2)}
    before = fingerprint(tensors)
    tensors["a"].view(torch.int32)[3] = 1
    assert fingerprint(tensors) != before
