"""What `record` tells the recorded program, as JSON in an environment variable."""

from dataclasses import dataclass

VARIABLE = "TUNE_KERNELS_RECORD"


@dataclass(frozen=True)
class Gpu:
    """The GPU that is played. capability: 103 for sm_103; shared_bytes: per block."""

    name: str
    capability: int
    sms: int
    memory_bytes: int
    shared_bytes: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    l2_bytes: int


@dataclass(frozen=True)
class Settings:
    """folder: of the events, one file per process; max_configs: compiled per tuning of an autotuned kernel; gpu: None to record
    the launches on the real one."""

    folder: str
    max_configs: int
    gpu: Gpu | None
