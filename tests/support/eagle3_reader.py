"""An EAGLE-3 drafter in plain torch and fp64, read with safetensors alone. It imports nothing of the project, keeps no cache and
recomputes everything at each step: what the project's loader, networks and trainer are held against."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class PlainDrafter:
    """tensors by their published names; embedding [V, H_embedding]."""

    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head_dim: int
    eps: float
    theta: float

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [n, 3H_target] as the drafter's [n, H]."""
        return features.double() @ self.weight("fc").T

    def step(self, tokens: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole layer over entries (tokens[i], features[i]) at positions 0..: the last one's (logits [V_d], feature [H])."""
        n = len(tokens)
        x = torch.cat([self._norm(self.embedding[tokens].double(), "midlayer.input_layernorm"),
                       self._norm(features, "midlayer.hidden_norm")], -1)
        q, k, v = ((x @ self.weight(f"midlayer.self_attn.{name}_proj").T).view(n, -1, self.head_dim).transpose(0, 1)
                   for name in "qkv")
        angle = torch.arange(n)[:, None] * self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)[None]
        cos, sin = torch.cat([angle.cos()] * 2, -1).double(), torch.cat([angle.sin()] * 2, -1).double()

        def turn(y: torch.Tensor) -> torch.Tensor:
            half = self.head_dim // 2
            return y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin

        k, v = (y.repeat_interleave(q.shape[0] // k.shape[0], 0) for y in (turn(k), v))
        out = torch.nn.functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True).transpose(0, 1).reshape(n, -1)
        x = features.double() + out @ self.weight("midlayer.self_attn.o_proj").T
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (y @ self.weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ self.weight("midlayer.mlp.down_proj").T
        return self._norm(x[-1], "norm") @ self.weight("lm_head").T, x[-1]

    def draft(self, tokens: list[int], features: torch.Tensor, length: int) -> list[int]:
        """`length` tokens after `tokens` [n], given the target's features at 0..n-2, [n - 1, 3H]."""
        entries, rows, drafted = list(tokens[1:]), self.reduce(features), list[int]()
        for _ in range(length):
            logits, feature = self.step(entries, rows)
            best = int(logits.argmax())
            drafted.append(best + int(self.tensors["d2t"][best]))
            entries, rows = [*entries, drafted[-1]], torch.cat([rows, feature[None]])
        return drafted

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight(name)


def read_drafter(folder: Path, embedding: torch.Tensor) -> PlainDrafter:
    """A folder in the published layout, int8 rows multiplied by their scales. Fails on a tensor too many or too few."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    scales = {name.removesuffix("_scale"): stored.pop(name) for name in list(stored) if name.endswith("_scale")}
    tensors = {name: tensor.double() * scales[name].double() if name in scales else tensor for name, tensor in stored.items()}
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")] + [
        "hidden_norm", "input_layernorm", "post_attention_layernorm"]
    names = {f"{n}.weight" for n in ("fc", "norm", "lm_head", *(f"midlayer.{part}" for part in layer))} | {"d2t", "t2d"}
    assert set(tensors) == names, set(tensors) ^ names
    ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert tensors["t2d"].shape == (config["vocab_size"],) and tensors["t2d"].nonzero()[:, 0].tolist() == sorted(ids.tolist())
    return PlainDrafter(tensors, embedding, config["head_dim"], config["rms_norm_eps"], config["rope_theta"])
