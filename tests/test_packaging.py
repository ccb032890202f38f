"""What is installed: one package with masks and passes inside it, from the checkout, a wheel and an sdist."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import csa2_compiled

ROOT = Path(__file__).resolve().parent.parent


def test_public_names():
    missing = [name for name in csa2_compiled.__all__ if not hasattr(csa2_compiled, name)]
    assert not missing


def test_masks_and_passes_are_relative_symlinks():
    for name in ("masks", "passes"):
        link = ROOT / "csa2_compiled" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


@pytest.mark.slow
def test_wheel_built_from_the_sdist_holds_both(tmp_path):
    # No isolation: the build must not need a network.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for module in ("attention", "masks/layout", "passes/manager"):
        assert f"csa2_compiled/{module}.py" in names
    assert "csa2_compiled/py.typed" in names
    assert "csa2_compiled/masks/page.html" in names
    for file in ("model.safetensors", "config.json", "README.md"):
        shipped = (ROOT / "csa2_compiled/assets" / file).read_bytes()
        assert zipfile.ZipFile(wheel).read(f"csa2_compiled/assets/{file}") == shipped
    assert not [name for name in names if name.startswith(("masks/", "passes/", "tests/"))]
    with tarfile.open(sdist) as archive:
        for file in ("layout.py", "page.html"):
            assert any(name.endswith(f"csa2_compiled/masks/{file}") for name in archive.getnames())
