"""Compiled graphs in one file: what it restores in empty caches, and what it is refused for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csa2_compiled import compile_cache
from csa2_compiled.compile_cache import (
    FORMAT,
    MAGIC,
    CompileCacheError,
    environment,
    load_compile_cache,
    pack,
    save_compile_cache,
)

_SCRIPT = """
import json, sys, torch
from csa2_compiled import CSA2Attention, CSA2Config, compile_model, load_compile_cache, save_compile_cache
torch.set_num_threads(1)
contents = load_compile_cache(sys.argv[2]) if sys.argv[1] == "load" else None
torch.manual_seed(0)
layer = CSA2Attention(CSA2Config.tiny(), 0).eval()
layer.layout = "plain"
compiled = compile_model(layer, dynamic=False)
with torch.no_grad():
    total = compiled(torch.randn(1, 48, 128)).hidden_states.double().sum().item()
if sys.argv[1] == "save":
    contents = save_compile_cache(sys.argv[2])
print(json.dumps([compiled.compilations, compiled.cache_hits, total, contents.artifacts, contents.libraries]))
"""


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch) -> Path:
    """An empty folder for the caches of this process and of those that it starts."""
    folder = tmp_path / "caches"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write(path: Path, payload: bytes = b"", libraries: tuple[tuple[str, int], ...] = (), **changed: object) -> Path:
    """A file in the format, made here, with some values of the header changed."""
    size = len(payload) - sum(size for _, size in libraries)
    header = {**environment(torch.device("cpu")), "artifacts": {}, "artifact_bytes": size, "libraries": libraries}
    path.write_bytes(pack({**header, **changed}, payload))
    return path


@pytest.mark.slow
def test_empty_caches_are_filled_so_that_nothing_is_compiled(tmp_path, monkeypatch):
    path = tmp_path / "compiled.bin"
    runs, libraries = [], {}
    for mode in ("save", "load"):
        folder = tmp_path / mode
        folder.mkdir()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        command = [sys.executable, "-c", _SCRIPT, mode, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        libraries[mode] = [name for name in files_in(folder) if name.endswith(".so")]
    assert libraries["load"] == libraries["save"]  # none was compiled anew, neither kernels nor tries of instructions
    saving, loading = runs
    assert saving[:2] == [1, 0]
    assert loading[:2] == [1, 1]
    assert saving[2:] == loading[2:]
    assert saving[3]["inductor"] == saving[3]["aot_autograd"] == 1
    assert saving[4] == sum(name.endswith(".main.so") for name in libraries["save"]) > 0


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("torch", "9.9.0", r"made with torch 9\.9\.0; here it is"),
        ("triton", "1.0", r"made with triton 1\.0"),
        ("python", "3.9.1", r"made with python 3\.9\.1"),
        ("package sources", "0" * 64, "made with package sources 0000"),
        ("machine", "Linux riscv64", "made with machine Linux riscv64"),
        ("CPU capability", "NEON", "made with CPU capability NEON"),
        ("CPU instructions", ["avx99"], "may use avx99, which this CPU does not have"),
        ("C++ command", "clang", "made with C\\+\\+ command clang"),
        ("device", "xpu", "is for device 'xpu'; allowed are"),
    ],
)
def test_another_environment_is_refused_by_name(tmp_path, caches, name, value, problem):
    path = write(tmp_path / "file.bin", **{name: value})
    with pytest.raises(CompileCacheError, match=problem):
        load_compile_cache(path)
    assert files_in(caches) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_file_for_a_gpu_is_refused_where_there_is_none(tmp_path):
    path = write(tmp_path / "file.bin", device="cuda", GPU="NVIDIA H200, capability 9.0")
    with pytest.raises(CompileCacheError, match=r"for NVIDIA H200, capability 9\.0, and torch finds no CUDA device"):
        load_compile_cache(path)


def test_damaged_files_are_refused_and_change_nothing(tmp_path, caches):
    path = write(tmp_path / "file.bin", b"artifacts library", (("ab/cabc.main.so", 7),))
    whole = path.read_bytes()
    cut = [
        whole[:size] for size in (0, 5, len(MAGIC), len(MAGIC) + 2, len(MAGIC) + 30, len(whole) // 2, len(whole) - 1)
    ]
    places = (0, len(MAGIC) + len(FORMAT), len(MAGIC) + 36, len(whole) // 2, len(whole) - 1)
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for content in (*cut, *flipped, whole + b"\0", b"PK\3\4" + whole):
        path.write_bytes(content)
        with pytest.raises(CompileCacheError, match=r"no compile cache|damaged or cut off|has format"):
            load_compile_cache(path)
    path.write_bytes(whole.replace(MAGIC + FORMAT, MAGIC + b"7\n"))
    with pytest.raises(CompileCacheError, match="has format '7'; this version reads '1'"):
        load_compile_cache(path)
    with pytest.raises(CompileCacheError, match=r"none\.bin cannot be read"):
        load_compile_cache(tmp_path / "none.bin")
    assert files_in(caches) == []


@pytest.mark.parametrize("name", ["../../evil.so", "/evil.so", "ab/evil.py", "ab/../cd/evil.main.so"])
def test_libraries_stay_within_the_caches(tmp_path, caches, name):
    path = write(tmp_path / "file.bin", b"library", ((name, 7),))
    with pytest.raises(CompileCacheError, match="has no place in a cache folder"):
        load_compile_cache(path)
    assert files_in(tmp_path) == ["file.bin"]


def test_artifacts_that_torch_cannot_read_leave_no_libraries(tmp_path, caches):
    path = write(tmp_path / "file.bin", b"no artifacts" + b"library", (("ab/cabc.main.so", 7),))
    with pytest.raises(CompileCacheError, match="artifacts that this torch cannot read"):
        load_compile_cache(path)
    assert files_in(caches) == []


def test_loading_keeps_libraries_that_are_there(tmp_path, caches, monkeypatch):
    monkeypatch.setattr(compile_cache, "_load_artifacts", lambda source, artifacts: None)
    path = write(tmp_path / "file.bin", b"one" + b"two", (("ab/cone.main.so", 3), ("cd/ctwo.main.so", 3)))
    (caches / "ab").mkdir()
    (caches / "ab" / "cone.main.so").write_bytes(b"in use")
    assert load_compile_cache(path).libraries == 2
    assert files_in(caches) == ["ab/cone.main.so", "cd/ctwo.main.so"]
    assert (caches / "ab" / "cone.main.so").read_bytes() == b"in use"
    assert (caches / "cd" / "ctwo.main.so").read_bytes() == b"two"
    assert os.access(caches / "cd" / "ctwo.main.so", os.X_OK)


def test_nothing_compiled_is_refused_and_keeps_an_older_file(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "graphs_compiled", lambda: 0)
    path = tmp_path / "file.bin"
    path.write_bytes(b"older")
    with pytest.raises(CompileCacheError, match="nothing was compiled"):
        save_compile_cache(path)
    assert path.read_bytes() == b"older"


def test_instructions_are_those_that_compilers_use(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse4_2 avx2 avx512f amx_tile hypervisor ibrs fma\n")
    assert compile_cache._cpu_instructions(cpuinfo) == {"sse4_2", "avx2", "avx512f", "amx_tile", "fma"}
    assert compile_cache._cpu_instructions(tmp_path / "none") == set()


@pytest.mark.parametrize("device", ["gpu", 3.5])
def test_a_device_that_torch_does_not_know_is_refused(tmp_path, device):
    with pytest.raises(CompileCacheError, match=f"device is {device!r}, which torch does not know"):
        save_compile_cache(tmp_path / "file.bin", device)
    assert not (tmp_path / "file.bin").exists()
