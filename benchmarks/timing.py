"""Timing shared by the benchmarks: medians of interleaved runs, and where they were measured."""

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent


def run_once(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call; device events on CUDA, so that launches queue up as in real use."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def medians(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int, warmup: int = 3
) -> dict[str, float]:
    """Median milliseconds of each function. Runs are interleaved, so that drift meets all of them alike."""
    for function in functions.values():
        for _ in range(warmup):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(run_once(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(function: Callable[[], Any], device: torch.device) -> float | None:
    """Peak GiB allocated during one call above what was allocated before it; None on CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def provenance(device: torch.device) -> dict[str, str]:
    """Machine, versions, date, commit and command: what a number needs to be believed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("CSA2_COMMIT") or _commit(),
        "command": " ".join(["python", *_without_output(sys.argv)]),
    }


def _without_output(arguments: list[str]) -> list[str]:
    # Where the JSON went is nobody's business.
    if "--output" not in arguments:
        return arguments
    at = arguments.index("--output")
    return arguments[:at] + arguments[at + 2 :]


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (set CSA2_COMMIT)"  # a copy of the tree without its history
    return found.stdout.strip()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
