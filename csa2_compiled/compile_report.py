"""What compiling costs: the cases, a process of its own for each, targets and comparisons. Nothing here prints.

`csa2 bench compile` and benchmarks/compile_time.py show it; `compile_measure` is what runs in a process.
"""

import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from csa2_compiled.compile_measure import ROLES, STACKS, STARTS, Case, Measurement
from csa2_compiled.run_report import Environment, environment_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CUDA_SECONDS = 180.0  # the default cases' time limit there
ALL_LENGTHS = (128, 1000, 2048, 8192)
PHASE_NAMES = {
    "load": "load a portable cache",
    "dynamo": "Dynamo",
    "aot_autograd": "AOTAutograd",
    "passes": "our passes",
    "inductor": "Inductor",
    "kernels": "C++ or Triton",
    "autotuning": "autotuning",
    "rest": "rest",
}
# Apart also in grey, in the order of PHASE_NAMES.
_COLOURS = ("#999999", "#E69F00", "#F0E442", "#000000", "#0072B2", "#56B4E9", "#D55E00", "#dddddd")
_TOKENS = {"cpu": 256, "cuda": 1024}


class CompareError(ValueError):
    """A report that cannot be read, or has nothing in common with the new one."""


@dataclass(frozen=True)
class Target:
    """A figure that compiling should reach. value: None where the cases it needs were not measured."""

    name: str
    value: float | None
    limit: float
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value <= self.limit


@dataclass(frozen=True)
class CompileReport:
    """All measurements, and the cases that have none with the reason."""

    environment: Environment
    date: str
    command: str
    measurements: tuple[Measurement, ...]
    not_measured: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One figure of one case against that of an older report. grown: past what is allowed."""

    case: str
    figure: str
    old: float
    new: float
    grown: bool


def default_cases(device: str) -> tuple[Case, ...]:
    """The cases that answer the targets, then the others, the most telling first."""
    base = Case("one of each role", "regional", lengths=(_TOKENS[device],), device=device)
    layer = replace(base, what="reuse r=1", mode="layer")
    return (
        *(replace(base, start=start) for start in STARTS),
        replace(base, what="40 layers"),
        replace(base, what="4 layers", mode="full", dynamic=True, lengths=ALL_LENGTHS, decode=True),
        *(replace(layer, what=what) for what in ROLES),
        *(replace(base, what=what, mode="full") for what in ("1 layer", "4 layers")),
        *(replace(layer, passes=passes) for passes in ("none", "inline")),
        replace(layer, dynamic=True),
    )


def all_cases(device: str) -> tuple[Case, ...]:
    """Every layer and stack, pass set, kind of shapes and start; hours on a CPU."""
    base = replace(default_cases(device)[0])
    whats = [(what, "layer") for what in ROLES] + list(product(STACKS, ("full", "regional")))
    grid = product(whats, ("all", "inline", "none"), (False, True), STARTS)
    cases = [
        replace(base, what=what, mode=mode, passes=passes, dynamic=dynamic, start=start)
        for (what, mode), passes, dynamic, start in grid
    ]
    lengths = [
        replace(base, what="4 layers", mode=mode, dynamic=dynamic, lengths=ALL_LENGTHS, decode=True)
        for mode, dynamic in product(("full", "regional"), (True, False))
    ]
    return (*cases, *lengths)


def run_cases(
    cases: Sequence[Case],
    on_case: Callable[[Case], None] = lambda case: None,
    time_limit: float = math.inf,
    command: str = "",
    on_report: Callable[[CompileReport], None] = lambda report: None,
) -> CompileReport:
    """Measure one case after the other, each in a fresh process with caches of its own.

    Starts "warm" and "portable" come after a cold one of the same case, which is measured too. on_case: called before
    each. time_limit: seconds after which no case is begun. command: for the report. on_report: called after each with
    the report so far.
    """
    environment = environment_of(torch.device(cases[0].device if cases else "cpu"))
    date = datetime.date.today().isoformat()
    deadline = time.perf_counter() + time_limit
    measured: list[Measurement] = []
    missing: dict[str, str] = {}
    for cold in dict.fromkeys(replace(case, start="cold") for case in cases):
        starts = [start for start in STARTS if start == "cold" or replace(cold, start=start) in cases]
        with tempfile.TemporaryDirectory(prefix="csa2-compile-") as folder:
            portable = Path(folder) / "portable.bin" if len(starts) > 1 else None
            for start in starts:
                case = replace(cold, start=start)
                if time.perf_counter() > deadline:
                    missing[case.name] = "the time limit had passed"
                    continue
                on_case(case)
                result = run_case(case, Path(folder) / ("empty" if start == "portable" else "caches"), portable)
                if isinstance(result, Measurement):
                    measured.append(result)
                else:
                    missing[case.name] = result
                on_report(CompileReport(environment, date, command, tuple(measured), dict(missing)))
    return CompileReport(environment, date, command, tuple(measured), missing)


def run_case(case: Case, caches: Path, portable: Path | None = None) -> Measurement | str:
    """Measure in a fresh process whose caches are below `caches`; the reason as text where that fails."""
    places = {name: caches / name.lower() for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    package = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}, "PYTHONPATH": path}
    case_path, result_path = caches / "case.json", caches / "result.json"
    case_path.write_text(json.dumps(asdict(case)), encoding="utf-8")
    arguments = [str(path) for path in (case_path, result_path, portable) if path is not None]
    command = [sys.executable, "-m", "csa2_compiled.compile_measure", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"
    return _measurement(json.loads(result_path.read_text(encoding="utf-8")))


def targets(report: CompileReport) -> tuple[Target, ...]:
    """The figures that compiling should reach, from the cases of `default_cases`."""
    found = {measurement.case: measurement for measurement in report.measurements}
    device = report.measurements[0].case.device if report.measurements else "cpu"
    cases = default_cases(device)
    each, deep = cases[0], next(case for case in cases if case.what == "40 layers")
    lengths = next((m for m in report.measurements if m.case.decode and m.case.dynamic and m.case.mode == "full"), None)
    cold = [m for m in report.measurements if m.case.start == "cold" and m.case.passes == "all"]
    breaks = sum(count for m in report.measurements for count in m.graph_breaks.values())
    return (
        Target("40 layers / one layer of each role, cold, regional", _ratio(found, deep, each), 1.3),
        Target("warm / cold", _ratio(found, replace(each, start="warm"), each), 0.1),
        Target("portable / cold", _ratio(found, replace(each, start="portable"), each), 0.1),
        Target(
            "our passes / compile time, at most",
            max((m.phases["passes"] / m.compile_seconds for m in cold), default=None),
            0.05,
        ),
        Target("graph breaks", float(breaks) if report.measurements else None, 0),
        Target(
            "compilations for 128 to 8192 tokens and decode",
            None if lengths is None else float(lengths.graphs),
            4,
            "" if lengths is None else ", ".join(f"{n} after {name}" for name, n in lengths.graphs_after.items()),
        ),
    )


def compare(new: CompileReport, old: CompileReport, threshold: float) -> tuple[Difference, ...]:
    """Figures of the cases that both reports have. Times may grow by the factor `threshold`, counts not at all.

    Raises CompareError where they have no case in common.
    """
    before = {measurement.case: measurement for measurement in old.measurements}
    pairs = [(before[m.case], m) for m in new.measurements if m.case in before]
    if not pairs:
        raise CompareError("the older report has none of these cases")
    differences = []
    for earlier, later in pairs:
        name = later.case.name
        seconds = earlier.compile_seconds, later.compile_seconds
        differences.append(Difference(name, "compile seconds", *seconds, seconds[1] > threshold * seconds[0]))
        for figure, count in COUNTS.items():
            counts = count(earlier), count(later)
            differences.append(Difference(name, figure, *counts, counts[1] > counts[0]))
    return tuple(differences)


COUNTS: dict[str, Callable[[Measurement], int]] = {
    "graph breaks": lambda m: sum(m.graph_breaks.values()),
    "graphs": lambda m: m.graphs,
    "recompilations": lambda m: len(m.recompilations),
    "launches": lambda m: sum(m.launches.values()),
}


def to_dict(report: CompileReport) -> dict[str, Any]:
    """As JSON values; `read_report` reads them back."""
    reached = [{**asdict(target), "met": target.met} for target in targets(report)]
    return {**asdict(report), "targets": reached}


def read_report(path: Path) -> CompileReport:
    """The report of a JSON file. Raises CompareError for one that cannot be read or is something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CompareError(f"{path} is not valid JSON: {error}") from error
    try:
        return CompileReport(
            Environment(**values["environment"]),
            values["date"],
            values["command"],
            tuple(_measurement(measurement) for measurement in values["measurements"]),
            values["not_measured"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(f"{path} is no report of compile times ({type(error).__name__}: {error})") from error


def draw(report: CompileReport) -> "Figure":
    """A bar a case, stacked by phase. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = report.measurements[::-1]
    figure = Figure(figsize=(10, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for (phase, label), colour in zip(PHASE_NAMES.items(), _COLOURS, strict=True):
        seconds = [row.phases[phase] for row in rows]
        axes.barh(range(len(rows)), seconds, left=left, label=label, color=colour)
        left = [before + value for before, value in zip(left, seconds, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.1f}", (total, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row.case.name for row in rows], fontsize=7)
    axes.set_xlabel("seconds to compile")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    where = report.environment
    figure.supxlabel(
        f"{where.device}, {where.threads} threads, torch {where.torch}, {report.date}, {report.command}", fontsize=7
    )
    return figure


def _ratio(found: dict[Case, Measurement], case: Case, base: Case) -> float | None:
    if case not in found or base not in found:
        return None
    return found[case].compile_seconds / found[base].compile_seconds


def _measurement(values: dict[str, Any]) -> Measurement:
    case = {**values["case"], "lengths": tuple(values["case"]["lengths"])}
    return Measurement(**{**values, "case": Case(**case), "recompilations": tuple(values["recompilations"])})
