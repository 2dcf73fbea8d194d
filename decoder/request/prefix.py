"""The start of a chat that is in the cache already: a later turn prefills the rest alone.

A key depends on the tokens up to it, and a prompt's pass gives the same bytes however the prompt is cut. So a turn that reuses
keys emits the tokens of a turn from nothing, as long as every reused key came from such a pass. A decode pass may differ from a
prompt's in the last bits; its keys are reused only on a backend where the two are one path.
"""

from dataclasses import dataclass, field
from itertools import takewhile

import torch


@dataclass
class Prefix:
    """tokens: those whose keys and values lie in the cache from slot 0 on, in order. layers: target layers whose features were
    kept; features: of every token, [tokens, n_layers * hidden_size] in all, in parts; empty without layers."""

    tokens: list[int] = field(default_factory=list)
    layers: tuple[int, ...] = ()
    features: list[torch.Tensor] = field(default_factory=list)

    def keep(self, prompt: list[int], layers: tuple[int, ...]) -> int:
        """Cuts this down to the tokens that begin `prompt` too; returns their number. The prompt's last token is never among
        them: the first new token follows from its row. layers: wanted by the request."""
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt[:-1])))
        if layers and layers != self.layers:
            alike = 0
        self.layers = layers
        self.features = [torch.cat(self.features)[:alike]] if layers and alike else []
        del self.tokens[alike:]
        return alike

    def add(self, tokens: list[int], features: torch.Tensor | None) -> None:
        """The next tokens are in the cache. features: of each of them."""
        self.tokens += tokens
        if features is not None:
            self.features.append(features)
