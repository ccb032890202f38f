"""Compiled graphs in one file: what it restores in empty caches, and what it is refused for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    unpack,
)
from csa2_compiled.passes.inductor import GLUON_TRITON_VERSIONS

_SCRIPT = """
import json, os, pathlib, sys, torch
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
headers = [any(pathlib.Path(os.environ["TMPDIR"]).rglob("precompiled_headers"))]
if sys.argv[1] == "load":
    folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    before = set(folder.rglob("*.main.so"))
    assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).tolist() == [1.0] * 8  # which the file does not hold
    assert len(set(folder.rglob("*.main.so")) - before) == 1
    headers.append(any(pathlib.Path(os.environ["TMPDIR"]).rglob("precompiled_headers")))
print(json.dumps([compiled.compilations, compiled.cache_hits, total, contents.artifacts, contents.libraries, headers]))
"""

# A CUDA driver that answers, and computes nothing.
_LIBCUDA = """
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1 << 20; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuCtxGetCurrent(void **context) { *context = context; return 0; }
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cuCtxGetLimit) DOES_NOTHING(cuCtxSetCurrent) DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuDeviceGet)
DOES_NOTHING(cuDevicePrimaryCtxRetain) DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuGetErrorString) DOES_NOTHING(cuLaunchKernelEx) DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleLoadData) DOES_NOTHING(cuPointerGetAttribute)
"""
_LAUNCH_SCRIPT = """
import json, sys, types, torch
from triton import knobs
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import build, driver
from csa2_compiled import load_compile_cache, save_compile_cache
from csa2_compiled.compiled import make_manager

class Hopper(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_current_device = self.get_current_stream = lambda device=0: 0
        self.get_device_capability = lambda device: (9, 0)

make_manager()
if sys.argv[1] == "load":
    load_compile_cache(sys.argv[2])
hits, built, compile_library = [], [], build._build
build._build = lambda name, *args: built.append(name) or compile_library(name, *args)
knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
driver.set_active(Hopper())
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
from csa2_compiled.passes.kernels.hopper_attention import hopper_attention

q, kv = torch.zeros(1, 8, 64, 512, dtype=torch.bfloat16), torch.zeros(1, 64, 512, dtype=torch.bfloat16)
slots, rotations = torch.zeros(1, 8, 128, dtype=torch.int32), torch.zeros(1, 8, 32, 2)
for selected in ((None, None), (kv, slots)):
    hopper_attention(q, torch.zeros(64), kv, slots, *selected, rotations, True, True)
if sys.argv[1] == "save":
    torch.compile(lambda x: x @ x)(torch.ones(3, 3))
    save_compile_cache(sys.argv[2], "cpu")
print(json.dumps([hits, built]))
"""


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch) -> Path:
    """An empty folder for the caches of this process and of those that it starts."""
    folder = tmp_path / "caches"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def run_script(script: str, mode: str, path: Path) -> list:
    """What a script prints last, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, mode, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


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
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        monkeypatch.setenv("TMPDIR", str(folder))
        runs.append(run_script(_SCRIPT, mode, path))
        libraries[mode] = [name for name in files_in(folder) if name.endswith(".so")]
    # One was compiled anew, which the script asks for: neither kernels of the file nor tries of instructions.
    assert set(libraries["load"]) > set(libraries["save"])
    assert len(libraries["load"]) == len(libraries["save"]) + 1
    saving, loading = runs
    assert saving[:2] == [1, 0]
    assert loading[:2] == [1, 1]
    assert saving[2:5] == loading[2:5]
    assert saving[5] == [True]
    assert loading[5] == [False, True]  # PyTorch's header is compiled once a kernel that the file lacks is
    assert saving[3]["inductor"] == saving[3]["aot_autograd"] == 1
    assert saving[4] == sum(name.endswith(".main.so") for name in libraries["save"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not (compile_cache._triton_version() or "").startswith(GLUON_TRITON_VERSIONS) or torch.cuda.is_available(),
    reason="needs the Triton that the Gluon kernel is for, and a machine without CUDA",
)
def test_kernels_that_ops_launch_are_not_compiled_again(tmp_path, caches, monkeypatch):
    source = tmp_path / "libcuda.c"
    source.write_text(_LIBCUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    for name in ("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches / "triton"))
    path = tmp_path / "compiled.bin"
    assert run_script(_LAUNCH_SCRIPT, "save", path) == [
        [False, False], ["cuda_utils", "__triton_launcher", "__triton_launcher"],
    ]  # fmt: skip
    shutil.rmtree(caches)  # which the lists of files name
    assert run_script(_LAUNCH_SCRIPT, "load", path) == [[True, True], []]


def test_files_of_triton_are_saved_by_folder_and_name(tmp_path, monkeypatch):
    def variant(folder: str, *missing: str) -> SimpleNamespace:
        group = {name: str(tmp_path / folder / name) for name in ("one.json", "one.cubin", "one.ptx")}
        (tmp_path / folder).mkdir()
        for name in sorted({*group} - {*missing}):
            Path(group[name]).write_text(f"{folder} {name}")
        return SimpleNamespace(metadata_group=group, module=None)

    variants = {1: variant("AB2"), 2: variant("CD3", "one.cubin")}  # a folder that lacks a file serves nobody
    kernel = SimpleNamespace(device_caches={0: (variants, {}), 1: ({1: variants[1]}, {})})
    monkeypatch.setattr(compile_cache, "graphs_compiled", lambda: 1)
    monkeypatch.setattr(compile_cache, "cpp_libraries", lambda: [])
    monkeypatch.setattr(compile_cache, "kernels_outside_graphs", lambda: [kernel])
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", SimpleNamespace(artifacts={})))
    path = tmp_path / "file.bin"
    save_compile_cache(path)
    header, payload = unpack(path, path.read_bytes())
    assert header["libraries"] == [["triton/AB2/one.json", 12], ["triton/AB2/one.cubin", 13]]
    assert payload == b"artifactsAB2 one.jsonAB2 one.cubin"


def test_files_of_triton_are_found_where_they_were_put(tmp_path, caches, monkeypatch):
    triton_cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setattr(compile_cache, "_load_artifacts", lambda source, artifacts: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches))
    names = ("AB2/one.json", "AB2/one.cubin", "CD3/launcher.so")
    load_compile_cache(write(tmp_path / "file.bin", b"abc", tuple((f"triton/{name}", 1) for name in names)))
    assert files_in(caches) == ["AB2/__grp__one.json", "AB2/one.cubin", "AB2/one.json", "CD3/launcher.so"]
    group = triton_cache.FileCacheManager("AB2").get_group("one.json")
    assert {name: Path(place).read_bytes() for name, place in group.items()} == {"one.json": b"a", "one.cubin": b"b"}
    assert Path(triton_cache.FileCacheManager("CD3").get_file("launcher.so")).read_bytes() == b"c"


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


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.so",
        "/evil.so",
        "ab/evil.py",
        "ab/../cd/evil.main.so",
        "triton/../evil.so",
        "triton/AB2/../evil.so",
        "triton/AB2/.evil.so",
        "triton/AB2/evil.py",
        "triton//evil.so",
    ],
)
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
