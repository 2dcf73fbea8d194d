"""The GPU that samples are taken on. Only samples of equal machines are compared."""

import hashlib
from dataclasses import dataclass

from ....shapes import target as shapes_target
from ....shapes.target import Target

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Machine:
    """A GPU as its driver names it. clocks: its clocks policy. uuid: tells GPUs of one name apart."""

    gpu: str
    driver: str
    cuda: str = NOT_RECORDED
    clocks: str = NOT_RECORDED
    uuid: str = NOT_RECORDED

    @property
    def digest(self) -> str:
        """8 hexadecimal digits that identify this GPU with its driver and clocks policy."""
        return hashlib.sha256(repr((self.gpu, self.driver, self.clocks, self.uuid)).encode()).hexdigest()[:8]

    @property
    def kind(self) -> str:
        """8 hexadecimal digits, equal for GPUs of one name, driver and clocks policy."""
        return hashlib.sha256(repr((self.gpu, self.driver, self.clocks)).encode()).hexdigest()[:8]


def sku_of(machine: Machine) -> Target:
    """The SKU of a machine's GPU. Raises ShapeError for an unlisted GPU."""
    return shapes_target.sku_of(machine.gpu)
