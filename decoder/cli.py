"""The decoder's commands, as `tune-kernels` and the tests load them. None imports torch before it runs."""

import click

from .commands.bench import bench
from .commands.generate import generate
from .commands.roofline import roofline
from .commands.train_drafter import train_drafter
from .commands.verify import verify

__all__ = ["bench", "generate", "main", "roofline", "train_drafter", "verify"]


@click.group()
def main() -> None:
    """The decoder: AR, SD and SSD, byte-identical."""


for _command in (generate, verify, bench, roofline, train_drafter):
    main.add_command(_command)

if __name__ == "__main__":
    main(prog_name="tune-kernels")
