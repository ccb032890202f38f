"""One file with what torch.compile made, to start another process or machine without compiling.

The file is a magic with the format's number, the SHA-256 of what follows, the length of a JSON header, the header, and
the payload: PyTorch's portable artifacts (`torch.compiler.save_cache_artifacts`), then what those do not hold: the
libraries of C++ kernels, and what Triton made for kernels that ops of this package launch.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csa2_compiled.compiled import make_manager
from csa2_compiled.passes.inductor import (
    cache_folder,
    cpp_command,
    cpp_libraries,
    graphs_compiled,
    put_triton_files,
    require_known_torch,
    triton_files,
    use_cpp_libraries,
    use_triton_cache_of_inductor,
)
from csa2_compiled.passes.kv_gather import kernels_outside_graphs
from csa2_compiled.whole_file import whole_file

MAGIC = b"CSA2 compile cache "
FORMAT = b"1\n"
_LENGTH_BYTES = 8
# Of C++ kernels, below Inductor's folder; of Triton, below its own.
_LIBRARY = re.compile(
    r"[a-z0-9]{2}/[a-z0-9]+(\.main)?\.so(\.load_ok)?|triton/[A-Z2-7]+/\w[\w.-]*\.(json|cubin|so)", re.ASCII
)
_TRITON = "triton/"
# Instruction sets that a compiler uses on its own when it compiles for the machine it is on.
_INSTRUCTIONS = re.compile(r"(avx|amx|s?sse|fma|bmi|f16c|vaes|vpclmul|gfni|sha|adx|lzcnt|movbe|popcnt|asimd|sve).*")


class CompileCacheError(ValueError):
    """A compile cache that cannot be saved, or a file that cannot be loaded here; says why."""


@dataclass(frozen=True)
class CompileCacheContents:
    """What a file holds: portable artifacts by PyTorch's name of their kind, C++ libraries, bytes in all."""

    artifacts: dict[str, int]
    libraries: int
    file_bytes: int


def save_compile_cache(path: str | os.PathLike[str], device: torch.device | str | None = None) -> CompileCacheContents:
    """Write all that this process compiled, or took from its caches, to one file for `load_compile_cache`.

    device: what the graphs run on, "cpu" or "cuda", for a check when the file is loaded; None: "cuda" where this
    process has used it, else "cpu". Libraries of a file that it loaded come along. An older file is replaced only once
    the new one is whole. Raises CompileCacheError if nothing was compiled, or for another device; OSError if the file
    cannot be written.
    """
    require_known_torch()
    chosen = _device(device)
    saved = torch.compiler.save_cache_artifacts() if graphs_compiled() else None
    if saved is None:
        raise CompileCacheError("nothing was compiled in this process, or with graph caches off: nothing to save")
    artifacts, info = saved
    libraries = [(path.relative_to(cache_folder()).as_posix(), path.read_bytes()) for path in cpp_libraries()]
    kernels = [path for kernel in kernels_outside_graphs() for path in triton_files(kernel)]
    libraries += [(f"{_TRITON}{path.parent.name}/{path.name}", path.read_bytes()) for path in kernels]
    payload = artifacts + b"".join(content for _, content in libraries)
    header = {
        **environment(chosen),
        "artifacts": {kind: len(keys) for kind, keys in info.artifacts.items()},
        "artifact_bytes": len(artifacts),
        "libraries": [[name, len(content)] for name, content in libraries],
    }
    content = pack(header, payload)
    with whole_file(Path(path)) as partial:
        partial.write_bytes(content)
    return _contents(header, len(content))


def load_compile_cache(path: str | os.PathLike[str]) -> CompileCacheContents:
    """Put what `save_compile_cache` wrote into this machine's caches, where later compilations find it.

    Load before the first launch of a kernel. Loading runs no code of the file, but the graphs that are compiled later
    do: load only files that you trust.
    Raises CompileCacheError, and changes nothing, for a file that is missing, damaged, or was made with another
    format, torch, Triton, Python, C++ compiler command, device or CPU, or from other sources of this package.
    """
    require_known_torch()
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise CompileCacheError(f"{source} cannot be read: {error.strerror}") from error
    header, payload = unpack(source, content)
    _check_environment(source, header)
    artifacts, libraries = _parts(source, header, payload)
    _load_artifacts(source, artifacts)
    of_triton = {name.removeprefix(_TRITON): libraries.pop(name) for name in [*libraries] if name.startswith(_TRITON)}
    if of_triton:
        if header["device"] == "cuda":
            use_triton_cache_of_inductor(torch.device("cuda", torch.cuda.current_device()))
        put_triton_files(of_triton)
    for name, library in libraries.items():
        target = cache_folder() / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as partial:
                partial.write_bytes(library)
            target.chmod(0o755)
    use_cpp_libraries(cache_folder() / name for name in libraries if name.endswith(".main.so"))
    return _contents(header, len(content))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CompileCacheError(f"device is {device!r}, which torch does not know; allowed are cpu and cuda") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise CompileCacheError(f"device is {str(chosen)!r}; allowed are cpu, and cuda where torch finds a GPU")
    return chosen


def environment(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on, by the names that errors use."""
    values: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "package sources": make_manager("none").uuid,
        "device": device.type,
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        values["GPU"] = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}"
        values["CUDA"] = torch.version.cuda
    else:
        values["CPU capability"] = torch.backends.cpu.get_cpu_capability()
        values["CPU instructions"] = sorted(_cpu_instructions())
        values["C++ command"] = cpp_command()
    return values


def _check_environment(source: Path, header: Mapping[str, Any]) -> None:
    device = header.get("device")
    if device not in ("cpu", "cuda"):
        raise CompileCacheError(f"{source} is for device {device!r}; allowed are 'cpu' and 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise CompileCacheError(f"{source} is for {header.get('GPU')}, and torch finds no CUDA device here")
    for name, here in environment(torch.device(device)).items():
        there = header.get(name)
        if name == "CPU instructions":
            missing = sorted(set(there or ()) - set(here))
            if missing:
                raise CompileCacheError(f"{source} may use {', '.join(missing)}, which this CPU does not have")
        elif there != here:
            raise CompileCacheError(f"{source} was made with {name} {there}; here it is {here}")


def pack(header: Mapping[str, Any], payload: bytes) -> bytes:
    """A file's bytes."""
    encoded = json.dumps(header).encode()
    body = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded + payload
    return MAGIC + FORMAT + hashlib.sha256(body).digest() + body


def unpack(source: Path, content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a file's bytes. Raises CompileCacheError unless they are whole and unchanged."""
    if not content.startswith(MAGIC):
        raise CompileCacheError(f"{source} is no compile cache: it does not begin with {MAGIC.decode()!r}")
    start = len(MAGIC) + len(FORMAT)
    if content[len(MAGIC) : start] != FORMAT:
        found = content[len(MAGIC) : start].decode(errors="replace").strip()
        raise CompileCacheError(f"{source} has format {found!r}; this version reads {FORMAT.decode().strip()!r}")
    digest, body = content[start : start + 32], content[start + 32 :]
    if digest != hashlib.sha256(body).digest():
        raise CompileCacheError(f"{source} is damaged or cut off: its content is not what was written")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    return json.loads(body[_LENGTH_BYTES:end]), body[end:]


def _parts(source: Path, header: Mapping[str, Any], payload: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The artifacts, and the libraries by their place in the cache folder."""
    end = header["artifact_bytes"]
    artifacts, libraries = payload[:end], {}
    for name, size in header["libraries"]:
        if not _LIBRARY.fullmatch(name):
            raise CompileCacheError(f"{source} names a library {name!r}, which has no place in a cache folder")
        libraries[name] = payload[end : end + size]
        end += size
    return artifacts, libraries


def _load_artifacts(source: Path, artifacts: bytes) -> None:
    if torch.compiler.load_cache_artifacts(artifacts) is None:
        raise CompileCacheError(f"{source} holds artifacts that this torch cannot read")


def _contents(header: Mapping[str, Any], file_bytes: int) -> CompileCacheContents:
    libraries = sum(name.endswith(".main.so") for name, _ in header["libraries"])
    return CompileCacheContents(dict(header["artifacts"]), libraries, file_bytes)


def _cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of this CPU as Linux names them; none elsewhere, where `machine` has to do."""
    if not cpuinfo.exists():
        return set()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return {flag for flag in flags.split() if _INSTRUCTIONS.fullmatch(flag)}


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
