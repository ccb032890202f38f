"""What the benchmarks share: shapes, medians of interleaved runs, where they were measured, files and tables."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from csa2_compiled import CSA2Config

REPOSITORY = Path(__file__).resolve().parent.parent
_CYCLES_PER_MS = 2_000_000  # of an H200 at its full clock
_MOST_AHEAD_MS = 50.0
_PATH_OPTIONS = ("--output", "--out", "--text")
T = TypeVar("T")


def require_device(name: str) -> torch.device:
    """The device of that name. Raises typer.BadParameter where it cannot be used."""
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device is cuda, but torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def shapes_for(device: torch.device) -> tuple[CSA2Config, torch.dtype, str]:
    """What is measured on a device, and its name in titles: the released shapes on CUDA, the tiny config's on CPU."""
    if device.type == "cuda":
        return CSA2Config.v41_flash(), torch.bfloat16, f"released shapes, {torch.bfloat16}"
    return CSA2Config.tiny(), torch.float32, f"tiny preset, {torch.float32}"


def run_once(function: Callable[[], Any], device: torch.device, calls: int = 1, ahead_ms: float = 0.0) -> float:
    """Milliseconds of one call, the mean of `calls` in a row.

    Device events on CUDA, so that launches queue up as in real use. ahead_ms: the device idles that long before the
    clock starts, so that the host has queued its launches by then.
    """
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if ahead_ms > 0:
            torch.cuda._sleep(int(ahead_ms * _CYCLES_PER_MS))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) * 1e3 / calls


def medians(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    warmup: int = 3,
    calls: int = 1,
    ahead: bool = False,
) -> dict[str, float]:
    """Median milliseconds of each function. Runs are interleaved, so that drift meets all of them alike.

    calls: in a row each time, so that their host time shows only where it is longer than the device's, as in a stack
    of such calls. ahead: leave the host's time out altogether, to compare kernels by the device's.
    """
    ahead_ms = dict.fromkeys(functions, 0.0)
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        if ahead and device.type == "cuda":
            ahead_ms[name] = min(0.1 + 2 * _host_ms(function, device) * calls, _MOST_AHEAD_MS)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(run_once(function, device, calls, ahead_ms[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _host_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until a call returns, while the device may still be at work."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def attempt(
    function: Callable[[], T], errors: type[Exception] = torch.cuda.OutOfMemoryError
) -> tuple[T | None, str | None]:
    """(the function's result, None), or (None, why there is none) where it raises one of `errors`."""
    try:
        return function(), None
    except errors as error:
        message = ". ".join(str(error).split(". ")[:2]).strip() or "no message"
        reason = f"{type(error).__name__}: {message}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, reason


def results_path(device: torch.device, question: str) -> Path:
    """Where a benchmark's JSON goes: named after the device (NVIDIA H200: h200) and the question it answers."""
    kind = torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else "cpu"
    return REPOSITORY / "benchmarks" / "results" / f"{kind}-{question}.json"


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a benchmark's JSON, also of a run that goes on."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read_result(path: Path, row_fields: Collection[str]) -> dict[str, Any]:
    """An earlier result of a benchmark, for --show; prints where it comes from.

    Raises typer.BadParameter for a file that cannot be read, or whose rows have other fields.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        others = {name for row in result["rows"] for name in row} - set(row_fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise typer.BadParameter(f"show: {path} is no result of this benchmark: {problem}") from error
    if others:
        raise typer.BadParameter(f"show: {path} is of another benchmark: its rows have {', '.join(sorted(others))}")
    known = ("device", "threads", "torch", "triton", "python", "date", "commit")
    print(", ".join(f"{key} {result[key]}" for key in known if key in result))
    print(result.get("command", ""))
    return result


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
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("CSA2_COMMIT") or _commit(),
        "command": shlex.join(["python", *without_paths(sys.argv)]),
    }


def without_paths(arguments: Sequence[str]) -> list[str]:
    """A command less --output, --out and --text and their values: where results went is nobody's business."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name not in _PATH_OPTIONS:
            kept.append(argument)
        elif not equals:
            next(rest, None)
    return kept


def number(value: float | None, form: str) -> str:
    """A figure in a table; a dash where there is none."""
    return "-" if value is None else format(value, form)


def make_table(title: str, headings: Iterable[str], left: Collection[str]) -> Table:
    """A table without rows; the columns that `left` names begin at the left, figures end at the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def print_reasons(console: Console, reasons: Iterable[tuple[str, str | None]]) -> None:
    """Why figures are missing, a line each: what was to be measured, and the reason, None where it was measured."""
    for name, reason in reasons:
        if reason is not None:
            console.print(f"{name}: {reason}", highlight=False, markup=False)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


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
