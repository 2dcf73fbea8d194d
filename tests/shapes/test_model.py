"""Model shapes: shipped files, Hugging Face configs, and every wrong or contradictory field refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.model import (
    AttentionShape,
    HeadShape,
    LinearShape,
    RopeShape,
    load_model_shape,
    shape_from_dict,
    shipped_names,
)

CONFIGS = Path(__file__).parents[1] / "data" / "configs"  # of published models
QWEN = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}


def write(folder: Path, **changes: Any) -> str:
    """The Qwen config with fields changed; None removes one."""
    table = {k: v for k, v in {**QWEN, **changes}.items() if v is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(table))
    return str(path)


def test_every_shipped_shape_loads_under_its_file_name() -> None:
    assert {"qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen2.5-7b-eagle3", "llama-3.1-8b", "smollm2-135m"} == set(
        shipped_names())
    for name in shipped_names():
        shape = load_model_shape(name)
        assert shape.name == name
        assert shape.source


def test_kernel_shapes_of_qwen_7b() -> None:
    """N x K of the four linears and the head, as Qwen2.5-7B's configuration gives them."""
    shapes = load_model_shape("qwen2.5-7b").kernel_shapes()
    assert shapes["qkv"] == LinearShape(4608, 3584, "e4m3", bias=True)
    assert shapes["o"] == LinearShape(3584, 3584)
    assert shapes["gate_up"] == LinearShape(37888, 3584, swiglu=True)
    assert shapes["down"] == LinearShape(3584, 18944)
    assert shapes["lm_head"] == HeadShape(152064, 3584)
    assert shapes["attention"] == AttentionShape(28, 4, 128)
    assert "fc" not in shapes


def test_a_drafter_has_a_wide_qkv_a_fusion_and_a_small_head() -> None:
    shapes = load_model_shape("qwen2.5-7b-eagle3").kernel_shapes()
    assert shapes["qkv"] == LinearShape((28 + 2 * 7) * 128, 2 * 3584)
    assert shapes["fc"] == LinearShape(3584, 3 * 3584)
    assert shapes["lm_head"] == HeadShape(32000, 3584, "e4m3"), "a drafter's head is one of its linears"


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_hugging_face_config_equals_the_shipped_shape(tmp_path: Path, as_folder: bool) -> None:
    path = write(tmp_path)
    found = load_model_shape(str(tmp_path) if as_folder else path)
    assert found.kernel_shapes() == load_model_shape("qwen2.5-7b").kernel_shapes()
    assert (found.rope_theta, found.qkv_bias, found.rope_scaling) == (1e6, True, None)


def test_one_config_has_one_name_however_its_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: and a name that is no path, whatever its folder is called."""
    folder = tmp_path / "my model"
    (folder / "sub").mkdir(parents=True)
    write(folder)
    monkeypatch.chdir(folder)
    for path in (".", "config.json", "sub/..", "../my model", str(folder)):
        assert load_model_shape(path).name == "my-model", path


def test_a_file_of_hugging_faces_cache_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """F18: whose file is a link to a folder of blobs that all models share."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs" / "f00").write_text(json.dumps(QWEN))
    (snapshot / "config.json").symlink_to(tmp_path / "blobs" / "f00")
    assert load_model_shape(str(snapshot)).name == "0a1b"


@pytest.mark.parametrize("name", ["../../../up", "/etc/x", "a b", ""])
def test_a_toml_shape_whose_name_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    """F18."""
    text = (Path(__file__).parents[2] / "shapes" / "smollm2-135m.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"smollm2-135m"', json.dumps(name)))
    with pytest.raises(ShapeError, match="expected: a name"):
        load_model_shape(str(tmp_path / "mine.toml"))


def test_rope_scaling_and_rope_parameters(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    assert load_model_shape(write(tmp_path, rope_scaling=scaling)).rope_scaling == scaling
    both = load_model_shape(write(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert (both.rope_theta, both.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(("changes", "named"), [
    ({"num_attention_heads": 27}, "num_attention_heads: 27 doesn't divide hidden_size 3584"),
    ({"num_key_value_heads": 5}, "num_kv_heads: 5 doesn't divide num_heads 28"),
    ({"hidden_size": None}, "hidden_size: missing"),
    ({"hidden_size": "3584"}, "hidden_size: '3584' is a str"),
    ({"hidden_size": True}, "hidden_size: True is a bool"),
    ({"hidden_size": -1}, "hidden_size: is -1"),
    ({"hidden_size": 10**12, "head_dim": 128}, "hidden_size: is 1000000000000"),
    ({"intermediate_size": 18945}, "intermediate_size: 18945 isn't a multiple of 16"),
    ({"head_dim": 100}, "head_dim: is 100"),
    ({"vocab_size": 0}, "vocab_size: is 0"),
    ({"architectures": ["MixtralForCausalLM"]}, "architectures: is"),
    ({"architectures": []}, "architectures: is"),
    ({"architectures": "Qwen2ForCausalLM"}, "architectures: 'Qwen2ForCausalLM' is a str"),
    ({"rope_scaling": 4}, "rope_scaling: 4 is a int"),
])
def test_a_wrong_config_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ShapeError) as refused:
        load_model_shape(write(tmp_path, **changes))
    assert named in str(refused.value)
    assert "expected:" in str(refused.value)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ShapeError, match=r"did you mean 'qwen2.5-7b'"):
        load_model_shape("qwen2.5-7B")
    with pytest.raises(ShapeError, match="No such file"):
        load_model_shape("nowhere/config.json")


def test_a_toml_shape_by_path_is_checked_too(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "shapes" / "smollm2-135m.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped.read_text().replace("num_kv_heads = 3", "num_kv_heads = 4"))
    with pytest.raises(ShapeError, match="num_kv_heads"):
        load_model_shape(str(mine))
    mine.write_text(shipped.read_text() + "\nnum_layer = 3\n")
    with pytest.raises(ShapeError, match=r"num_layer: unknown field \(did you mean 'num_layers'"):
        load_model_shape(str(mine))


def test_a_head_as_it_was_written_before_it_had_a_type() -> None:
    assert shape_from_dict({"N": 8, "K": 16}, "a file of before") == HeadShape(8, 16)
    rope = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "split_k": 1}
    assert shape_from_dict(rope, "a file of before") == RopeShape(4, 2, 16, 1, rows=1)


@pytest.mark.parametrize("name", ["qwen3-8b", "mistral-7b-v0.3", "llama-3.1-8b", "qwen2.5-14b"])
def test_families_by_their_config(name: str) -> None:
    """Heads are normed in Qwen3 alone, and its RoPE takes one row a program, whatever the launch."""
    from tune_kernels.kernels.fixed import FIXED
    from tune_kernels.schedules.recipe import load_recipe

    shape = load_model_shape(str(CONFIGS / name))
    assert shape.name == name and shape.qk_norm == (name == "qwen3-8b") and ("qk_norm" in shape.sizes) == shape.qk_norm
    ropes = FIXED["rope"].shapes(shape, load_recipe("fp8-v1"), {"qkv": []})
    assert [(rope.rows, rope.qk_norm) for rope in ropes] == [(1, True)] if shape.qk_norm else [(8, False)]
