"""The loss of EAGLE-3: cross-entropy against the target's distribution over the draft vocabulary, at every step of a draft.

Step j has weight DECAY^j. A row counts if its draft begins in the answer, its predicted token is in the answer too, and the
target's choice is in the draft vocabulary.
"""

import torch

from .batches import Batch
from .network import DrafterNetwork
from .target import Target

DECAY = 0.8


def training_loss(network: DrafterNetwork, target: Target, batch: Batch, steps: int) -> torch.Tensor:
    """The loss of a batch, a scalar: mean over rows, sum over steps. Runs target and drafter."""
    observed = target.observe(batch.ids)
    place = torch.arange(batch.ids.shape[1], device=target.device)[None]
    first = batch.starts[:, None] - 1  # the entry from which the answer's second token is drafted
    rows = ((place >= first) & (place + 2 < batch.lengths[:, None])).nonzero(as_tuple=True)
    with target.autocast():
        wanted, known = wanted_distribution(network, target, observed.final[rows[0], rows[1] + 1])
        begins = (rows[1] - batch.starts[rows[0]] + 1)
        total = torch.zeros((), device=target.device)
        for step, feature in enumerate(network.unroll(observed.features, observed.embedded, steps)):
            log_q = torch.log_softmax(network.logits(feature[rows]).float(), -1)
            weight = (known & (begins >= step)).float()
            total = total - DECAY**step * ((wanted * log_q).sum(-1) * weight).sum() / weight.sum().clamp_min(1)
    return total


@torch.no_grad()
def wanted_distribution(network: DrafterNetwork, target: Target, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(p [rows, V_d], known [rows]): the target's distribution over the draft vocabulary, and whether its winner is in it. final
    [rows, H]: the target's rows after its last norm."""
    logits = final @ target.head.T
    inside = logits[:, network.ids]
    return torch.softmax(inside.float(), -1), inside.amax(-1) == logits.amax(-1)
