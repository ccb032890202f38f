"""What works on this machine, and why the rest does not: the data behind `csa2 doctor`.

Features marked "tried" were run here just now; "inferred" ones follow from the versions and the hardware.
"""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from csa2_compiled.config import CSA2Config
from csa2_compiled.kernel_options import ForwardTiles, forward_tiles
from csa2_compiled.masks.layout import KEY_BLOCK
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.passes.inductor import KNOWN_VERSIONS, cpp_compiler, shared_memory_per_block

EAGER, KNOWN_TORCH = "eager", "torch known to the passes"
COMPILE_ON_CPU, COMPILE_ON_CUDA = "compile on CPU", "compile on CUDA"
HEAD_DIMS = (64, 128, 512)
_BFLOAT16_BYTES = 2
_CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "neon", "sve")


@dataclass(frozen=True)
class TileChoice:
    """FlexAttention's forward tiles for bfloat16 and 128 query rows; None with the reason where none fit."""

    head_dim: int
    tiles: ForwardTiles | None
    reason: str


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device; shared memory in bytes a block, by default and when a kernel opts in."""

    name: str
    capability: str
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    tiles: tuple[TileChoice, ...]


@dataclass(frozen=True)
class Feature:
    """Whether a feature works here, how or why not. tried: run just now, not inferred."""

    name: str
    works: bool
    detail: str
    tried: bool = False


@dataclass(frozen=True)
class DoctorReport:
    """The machine and its features.

    torch_known: the passes were written against this version. triton, cpp_compiler: None where there is none.
    cpu_features: what torch uses, then instruction sets that matter here and are there.
    """

    torch: str
    torch_known: bool
    python: str
    triton: str | None
    cpp_compiler: str | None
    cpu_features: tuple[str, ...]
    cuda_devices: tuple[CudaDevice, ...]
    features: tuple[Feature, ...]

    @property
    def core_works(self) -> bool:
        """Whether eager runs work, and compiled runs on at least one device."""
        works = {feature.name for feature in self.features if feature.works}
        return {EAGER, KNOWN_TORCH} <= works and bool({COMPILE_ON_CPU, COMPILE_ON_CUDA} & works)


def examine() -> DoctorReport:
    """Look at this machine; compiles one small function a device, a few seconds each."""
    compiler = _describe_compiler(cpp_compiler())
    return DoctorReport(
        torch=torch.__version__,
        torch_known=torch_is_known(torch.__version__),
        python=platform.python_version(),
        triton=_triton_version(),
        cpp_compiler=compiler,
        cpu_features=_cpu_features(),
        cuda_devices=_cuda_devices(),
        features=_features(compiler),
    )


def compile_obstacle(device: str) -> str | None:
    """Why compiled runs cannot work on "cpu" or "cuda" here, or None; tries nothing."""
    if not torch_is_known(torch.__version__):
        return f"torch {torch.__version__} is not among the known versions ({', '.join(KNOWN_VERSIONS)})"
    if device == "cuda":
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return None if _triton_version() else "Triton is not installed"
    return None if cpp_compiler() else "no C++ compiler was found (install g++ or clang++, or set CXX)"


def run_obstacle(device: str) -> str | None:
    """Why a whole compiled model cannot run on "cpu" or "cuda" here, or None; tries nothing."""
    obstacle = compile_obstacle(device)
    if obstacle is None and device == "cpu":
        return flex_on_cpu_obstacle(torch.backends.cpu.get_cpu_capability(), sys.platform)
    return obstacle


def flex_on_cpu_obstacle(capability: str, system: str) -> str | None:
    """Why Inductor cannot compile FlexAttention for this CPU, or None.

    capability: ``torch.backends.cpu.get_cpu_capability()``; system: ``sys.platform``. The rule is that of
    torch/_inductor/kernel/flex/flex_cpu.py.
    """
    if system == "darwin":
        return "Inductor has no FlexAttention for CPUs under macOS"
    if capability not in ("AVX2", "AVX512"):
        return f"Inductor's FlexAttention for CPUs needs AVX2; torch uses {capability} here"
    return None


def torch_is_known(version: str) -> bool:
    """Whether the passes were written against this version of torch."""
    return ".".join(version.split(".")[:2]) in KNOWN_VERSIONS


def choose_tiles(shared_memory: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> tuple[TileChoice, ...]:
    """The tiles taken for bfloat16 and KEY_BLOCK query rows on a device that allows so many bytes a block."""
    return tuple(_choose_tiles(shared_memory, head_dim) for head_dim in head_dims)


def _choose_tiles(shared_memory: int, head_dim: int) -> TileChoice:
    try:
        tiles = forward_tiles(head_dim, _BFLOAT16_BYTES, shared_memory, query_rows=KEY_BLOCK)
    except ValueError as error:
        return TileChoice(head_dim, None, str(error))
    return TileChoice(head_dim, tiles, f"{tiles.shared_bytes} of {shared_memory} bytes of shared memory")


def _cuda_devices() -> tuple[CudaDevice, ...]:
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        optin = shared_memory_per_block(torch.device("cuda", index))
        devices.append(
            CudaDevice(
                properties.name,
                f"{properties.major}.{properties.minor}",
                properties.shared_memory_per_block,
                optin,
                choose_tiles(optin),
            )
        )
    return tuple(devices)


def _features(compiler: str | None) -> tuple[Feature, ...]:
    cpu = Feature(COMPILE_ON_CPU, False, compile_obstacle("cpu") or "")
    if compiler is not None:
        cpu = _try(COMPILE_ON_CPU, lambda: _compile_on("cpu"), "a C++ kernel was built and ran")
    cuda = Feature(COMPILE_ON_CUDA, False, compile_obstacle("cuda") or "")
    if torch.cuda.is_available():
        cuda = _try(COMPILE_ON_CUDA, lambda: _compile_on("cuda"), "a Triton kernel was built and ran")
    known = torch_is_known(torch.__version__)
    return (
        _try(EAGER, _run_eager, "a tiny model ran"),
        Feature(KNOWN_TORCH, known, f"{torch.__version__}; known are {', '.join(KNOWN_VERSIONS)}", tried=True),
        cpu,
        cuda,
        *_flex_features(cpu, cuda),
        _try("float8_e4m3fn", lambda: _round_trip("float8_e4m3fn"), "converts from and to float32"),
        _try("float8_e8m0fnu", lambda: _round_trip("float8_e8m0fnu"), "converts from and to float32"),
        _try("safetensors with E8M0 scales", _store_e8m0, "written and read back (released checkpoints)"),
        _matplotlib(),
    )


def _flex_features(cpu: Feature, cuda: Feature) -> tuple[Feature, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    obstacle = flex_on_cpu_obstacle(capability, sys.platform)
    if not cpu.works:
        obstacle = f"{COMPILE_ON_CPU} does not work"
    forward = Feature("FlexAttention forward, compiled, CPU", obstacle is None, obstacle or f"CPU has {capability}")
    backward = Feature(
        "FlexAttention backward, CPU",
        False,
        "PyTorch has none; gradients take the plain layout instead",
    )
    on_cuda = Feature(
        "FlexAttention forward, compiled, CUDA",
        cuda.works,
        "tiles come from the device's shared memory" if cuda.works else f"{COMPILE_ON_CUDA} does not work",
    )
    return forward, backward, on_cuda


def _try(name: str, attempt: Callable[[], None], success: str) -> Feature:
    try:
        attempt()
    except Exception as error:  # whatever breaks is the answer
        first_line = next(iter(str(error).strip().splitlines()), "")
        return Feature(name, False, f"{type(error).__name__}: {first_line}".rstrip(": "), tried=True)
    return Feature(name, True, success, tried=True)


def _run_eager() -> None:
    with torch.no_grad():
        logits = CSA2ForCausalLM(CSA2Config.tiny())(torch.zeros(1, 8, dtype=torch.int64))
    if not logits.isfinite().all():
        raise ValueError("the logits are not finite")


def _compile_on(device: str) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True, options={"fx_graph_cache": False})
    x = torch.arange(64, dtype=torch.float32, device=device)
    torch.testing.assert_close(compiled(x), x.sin() + 1)


def _round_trip(dtype: str) -> None:
    x = torch.tensor([0.5, 1.0, 2.0])
    if not torch.equal(x.to(getattr(torch, dtype)).to(torch.float32), x):
        raise ValueError("powers of two do not survive it")


def _store_e8m0() -> None:
    # Through a file and safe_open, as load_attention reads; safetensors.torch.load does not know E8M0.
    scale = torch.tensor([0.5, 2.0]).to(torch.float8_e8m0fnu)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scale.safetensors"
        save_file({"scale": scale}, path)
        with safe_open(path, framework="pt") as file:
            loaded = file.get_tensor("scale")
    if loaded.dtype != scale.dtype or not torch.equal(loaded.float(), scale.float()):
        raise ValueError("the scales changed")


def _matplotlib() -> Feature:
    version = _version("matplotlib")
    detail = version or 'not installed; pip install "csa2-compiled[viz]"'
    return Feature("matplotlib (drawing masks)", version is not None, detail)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _triton_version() -> str | None:
    return _version("triton") or _version("pytorch-triton")


def _describe_compiler(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return path
    return f"{shutil.which(path) or path}: {next(iter(found.stdout.splitlines()), '')}"


def _cpu_features() -> tuple[str, ...]:
    used = f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    if not hasattr(torch.cpu, "get_capabilities"):  # came after torch 2.11
        return (used,)
    capabilities = torch.cpu.get_capabilities()
    return used, *(name for name in _CPU_FEATURES if capabilities.get(name))
