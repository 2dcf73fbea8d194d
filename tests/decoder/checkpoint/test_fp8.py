"""Checkpoints that are FP8 already: taken as they are in each layout, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.fp8 import E4M3, dequantised
from tune_kernels.decoder.checkpoint.hugging_face import hugging_face_from_tensors
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.errors import LoadError
from tune_kernels.decoder.on_gpu.weights import pack_layer
from tune_kernels.kernels.linear import interleave
from tune_kernels.schedules.recipe import load_recipe

CPU = torch.device("cpu")
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL}}, "quantization_status": "compressed"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
TENSOR = COMPRESSED | {"config_groups": {"group_0": {"weights": CHANNEL | {"strategy": "tensor"}}}}
LAYOUTS = {"compressed-tensors": COMPRESSED, "fbgemm": FBGEMM, "per tensor": TENSOR}


def quantised(folder: Path, to: Path, declared: Any, layout: str = "compressed-tensors", **changes: Any) -> Path:
    """A folder whose projections are e4m3 with scales; changes: tensors by name, None removes one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | {"quantization_config": declared}
    (to / "config.json").write_text(json.dumps(config))
    stored: dict[str, Any] = {}
    for name, w in load_file(to / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = w.bfloat16()
            continue
        peak = w.abs().amax() if layout == "per tensor" else w.abs().amax(1, keepdim=True)
        scale = (peak / 448).bfloat16() if layout == "compressed-tensors" else (peak / 448).float().reshape(-1, 1)
        stored[name], stored[name + "_scale"] = (w / scale.float()).clamp(-448, 448).to(E4M3), scale
        if layout == "fbgemm":
            stored[name.removesuffix("weight") + "input_scale_ub"] = torch.tensor([1200.0])
    stored |= changes
    save_file({n: t.contiguous() for n, t in stored.items() if t is not None}, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_values_are_transformers_dequantised_ones(layout: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """In fp32: the logits of Hugging Face's model with weights dequantised here by hand."""
    from safetensors.torch import load_file

    folder = quantised(tiny_folders["qwen3"], tmp_path / "m", LAYOUTS[layout], layout)
    stored = load_file(folder / "model.safetensors")
    model = hugging_face_from_tensors(load_checkpoint(tiny_folders["qwen3"], None, CPU)).eval()
    plain = {name: stored[name].float() * stored[name + "_scale"].float() if name + "_scale" in stored else stored[name].float()
             for name in model.state_dict() if name in stored}
    model.load_state_dict(plain, strict=False)
    decoder = Decoder.load(str(folder), recipe="fp32")
    tokens = list(range(40, 70))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    found = decoder.generate(tokens, "ar", max_new_tokens=1, logprobs=1)
    assert found.token_ids == [int(expected[:decoder.tokenizer.size].argmax())]
    own = dequantised(load_checkpoint(folder, None, CPU).tensors)
    assert all(torch.equal(own[name].float(), plain[name]) for name in plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_and_scales_are_kept_and_all_modes_agree(layout: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Both backends multiply the stored e4m3 values with the stored scales."""
    folder = quantised(tiny_folders["llama"], tmp_path / "m", LAYOUTS[layout], layout)
    tensors = load_checkpoint(folder, None, CPU).tensors
    name = "model.layers.0.mlp."
    gates = [tensors[f"{name}{part}_proj.weight"] for part in ("gate", "up")]
    scales = torch.cat([tensors[f"{name}{part}_proj.weight_scale"] for part in ("gate", "up")])
    decoder = Decoder.load(str(folder), recipe="fp8-v1", drafter="ngram")
    assert torch.equal(decoder.model.layers[0].gate_up.w_scale, scales)
    packed = pack_layer(tensors, "model.layers.0.", load_recipe("fp8-v1").precision, decoder.model.shape, CPU).gate_up
    assert packed.w.dtype == E4M3 and torch.equal(packed.w.view(torch.uint8), interleave(torch.cat(gates)).view(torch.uint8))
    assert packed.scale is not None and torch.equal(packed.scale, interleave(scales))
    outs = [decoder.generate("two and two", mode, max_new_tokens=20, ignore_eos=True).token_ids for mode in ("ar", "sd")]
    assert outs[0] == outs[1]


def declared(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"weights": CHANNEL | weights}}}


@pytest.mark.parametrize(("config", "message"), [
    (declared(strategy="group"), "strategy: is 'group'"),
    (declared(strategy="block"), "scales inside a row need a kernel"),
    (declared(type="int"), "type: is int of 8 bits"),
    (declared(num_bits=4), "type: is float of 4 bits"),
    (COMPRESSED | {"format": "pack-quantized"}, "format: is 'pack-quantized'"),
    (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "a quantised KV cache is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"scales per block of \[128, 128\]"),
    ({"quant_method": "awq"}, "quant_method: is 'awq'"),
    ({"bits": 4}, "quant_method: missing"),
])
def test_other_ways_are_refused_by_name(config: Any, message: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        load_checkpoint(quantised(tiny_folders["llama"], tmp_path / "m", config), None, CPU)


Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
NAN = torch.full((64, 64), 0x7F, dtype=torch.uint8).view(E4M3)


@pytest.mark.parametrize(("tensors", "message"), [
    ({Q + "_scale": None}, "q_proj.weight_scale is missing"),
    ({Q + "_scale": torch.ones(3, 1)}, r"q_proj.weight_scale is torch.float32 \[3, 1\]"),
    ({Q + "_scale": torch.zeros(64, 1)}, "isn't positive and finite"),
    ({Q + "_scale": torch.full((64, 1), torch.inf)}, "isn't positive and finite"),
    ({Q: NAN}, "q_proj.weight holds NaN"),
    ({GATE: torch.ones(112, 64), GATE + "_scale": None}, "up_proj.weight is e4m3 and gate_proj is not"),
    ({"model.embed_tokens.weight": torch.ones(272, 64).to(E4M3)}, "embed_tokens.weight is e4m3"),
    ({"model.layers.0.self_attn.o_proj.input_scale": torch.ones(1)}, "o_proj.input_scale isn't part of"),
])
def test_wrong_tensors_are_refused_by_name(tensors: dict[str, Any], message: str, tiny_folders: dict[str, Path],
                                           tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        load_checkpoint(quantised(tiny_folders["llama"], tmp_path / "m", COMPRESSED, **tensors), None, CPU)


def test_a_declaration_without_fp8_is_refused(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_folders["llama"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": FBGEMM}))
    with pytest.raises(LoadError, match="declares FP8 and no tensor is e4m3"):
        load_checkpoint(tmp_path / "m", None, CPU)
