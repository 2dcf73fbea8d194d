"""Git for tests: none of the machine's configuration, an identity of its own."""

import os
import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.com", "-c", "commit.gpgsign=false"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True,
                          env={**clean, "GIT_CONFIG_GLOBAL": os.devnull, **environment})
