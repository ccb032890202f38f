"""The pass manager: an ordered list of passes over each graph, with counters and reasons.

Inductor calls it once a graph, before its own post-grad passes, where named ops are still whole. Its uuid
covers the sources of this project, because inlined bodies become part of the compiled code; so Inductor's
FX graph cache keeps working and never serves a graph of other sources.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx


@dataclass
class PassReport:
    """What one pass did to one graph: how often it rewrote which op, and why it left others alone."""

    name: str
    fired: Counter[str] = field(default_factory=Counter)
    declined: Counter[tuple[str, str]] = field(default_factory=Counter)

    def fire(self, op: str) -> None:
        self.fired[op] += 1

    def decline(self, op: str, reason: str) -> None:
        self.declined[(op, reason)] += 1


class CompilerPass(ABC):
    """One rewrite with one job. `run` edits the graph in place and reports."""

    name: str

    @abstractmethod
    def run(self, graph: fx.Graph) -> PassReport: ...


class PassManager:
    """Runs passes in order over every graph that Inductor compiles, and keeps their reports.

    seconds: spent in each pass so far.
    """

    def __init__(self, passes: Sequence[CompilerPass], sources: Iterable[Path]) -> None:
        self.passes = tuple(passes)
        self.reports: list[tuple[PassReport, ...]] = []
        self.seconds = dict.fromkeys(self.names, 0.0)
        digest = hashlib.sha256("+".join(self.names).encode())
        for source in sorted(sources):
            digest.update(source.read_bytes())
        self.uuid = digest.hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(compiler_pass.name for compiler_pass in self.passes)

    def __call__(self, graph: fx.Graph) -> None:
        reports = tuple(self._run(compiler_pass, graph) for compiler_pass in self.passes)
        graph.lint()
        # Inductor also sends the small graphs of mask and score mods, which hold nothing of ours.
        if any(report.fired or report.declined for report in reports):
            self.reports.append(reports)

    def _run(self, compiler_pass: CompilerPass, graph: fx.Graph) -> PassReport:
        start = time.perf_counter()
        report = compiler_pass.run(graph)
        # run_report puts a pass in front of those that it was made with.
        self.seconds[compiler_pass.name] = self.seconds.get(compiler_pass.name, 0.0) + time.perf_counter() - start
        return report

    def totals(self, first_graph: int = 0) -> tuple[PassReport, ...]:
        """The reports of all graphs, or of those from number `first_graph` on, added up, one a pass."""
        totals = {name: PassReport(name) for name in self.names}
        for report in (report for graph in self.reports[first_graph:] for report in graph):
            totals[report.name].fired.update(report.fired)
            totals[report.name].declined.update(report.declined)
        return tuple(totals.values())

    def explain(self) -> str:
        """A few lines of text: what each pass rewrote and what it declined, with the reason."""
        if not self.passes:
            return "no passes: named ops run as they are, one call each"
        lines = [f"{len(self.reports)} graph(s) seen; graphs served from a cache are not seen again"]
        for report in self.totals():
            rewritten = ", ".join(f"{count} x {op}" for op, count in sorted(report.fired.items()))
            lines.append(f"{report.name}: rewrote {rewritten or 'nothing'}")
            lines += [f"  declined {count} x {op}: {reason}" for (op, reason), count in sorted(report.declined.items())]
        return "\n".join(lines)
