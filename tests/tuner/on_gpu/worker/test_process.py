"""A cubin that is launched is the one that was inspected (F17)."""

import json
from pathlib import Path

import pytest
from fake_gpu import candidates, write_bundle
from tune_kernels.kernels import bundle
from tune_kernels.kernels.bundle import BundleError
from tune_kernels.tuner.on_gpu.worker.process import judged


def artefact(folder: Path, key: str, cubin: bytes) -> Path:
    bundle.save(folder, key, "kernel", {}, "ptx", cubin)
    return folder / "artefacts" / key


def test_a_cubin_that_was_never_inspected_is_refused(tmp_path: Path) -> None:
    """F17: another variant's cubin, with its own sha256.json."""
    mine = bundle.read(artefact(tmp_path, "mine", b"mine"))
    other = bundle.read(artefact(tmp_path, "other", b"other"))
    known = {"mine": bundle.sha256(b"mine")}
    bundle.require_judged(mine, "mine", known)
    with pytest.raises(BundleError, match=r"its cubin is .*, the inspected one was"):
        bundle.require_judged(other, "mine", known)


@pytest.mark.parametrize("text", ["{}", "[]", "5", '["kernel.cubin"]', '{"kernel.json": 5}', ""])
def test_a_digest_file_without_a_cubin_is_named(tmp_path: Path, text: str) -> None:
    """F17: `{}` was a StopIteration."""
    place = artefact(tmp_path, "key", b"cubin")
    (place / "sha256.json").write_text(text)
    with pytest.raises(BundleError, match="artefact"):
        bundle.read(place)


def test_the_report_says_which_cubins_were_inspected(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, {"down": candidates()[:1]})
    table = json.loads((folder / "report.json").read_text())
    [variant] = table["variants"]
    assert judged(str(folder)) == {variant["artefact"]: variant["cubin_sha256"]}
