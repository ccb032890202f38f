"""Measurements of compile times that nobody measured, for tests of what is made of them."""

from dataclasses import replace
from typing import Any

from csa2_compiled.compile_measure import Case, Measurement
from csa2_compiled.compile_report import CompileReport, default_cases
from csa2_compiled.passes.inductor import PHASES
from csa2_compiled.run_report import Environment

EACH = default_cases("cpu")[0]
DEEP = replace(EACH, what="40 layers")
LENGTHS = next(case for case in default_cases("cpu") if case.decode)


def make_measurement(case: Case = EACH, seconds: float = 10.0, passes: float = 0.25, **fields: Any) -> Measurement:
    """Of a case that took so long, almost all of it in Inductor."""
    phases = {**dict.fromkeys(PHASES, 0.0), "load": 0.0, "rest": 0.0, "inductor": seconds - passes, "passes": passes}
    values: dict[str, Any] = {
        "case": case,
        "compile_seconds": seconds,
        "phases": phases,
        "passes": {"inline": passes},
        "forward_seconds": 0.01,
        "graphs": 6,
        "graphs_after": {"256": 6},
        "cache_hits": 0,
        "graph_breaks": {},
        "guards": 100,
        "recompilations": (),
        "kernels_generated": 20,
        "launches": {"generated": 12, "library": 8},
        "peak_process": 100.0,
        "peak_compiler": 300.0,
        "peak_device": None,
    }
    return Measurement(**{**values, **fields})


def make_report(*measurements: Measurement) -> CompileReport:
    environment = Environment("2.13.0", "3.11.7", "CPU", 2)
    return CompileReport(environment, "2026-01-01", "csa2 bench compile", measurements, {})
