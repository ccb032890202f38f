"""The pass manager: order, counters, reasons, uuid; the inlining pass on a small graph."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from csa2_compiled import ops
from csa2_compiled.passes import CompilerPass, InlineNamedOps, PassManager, PassReport


class Recorder(CompilerPass):
    """Fires on every relu, or declines it."""

    def __init__(self, name: str, log: list[str], reason: str | None = None) -> None:
        self.name, self.log, self.reason = name, log, reason

    def run(self, graph: fx.Graph) -> PassReport:
        self.log.append(self.name)
        report = PassReport(self.name)
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                if self.reason is None:
                    report.fire("relu")
                else:
                    report.decline("relu", self.reason)
        return report


def trace(function, *inputs) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_passes_run_in_order_and_add_up():
    log: list[str] = []
    manager = PassManager([Recorder("first", log), Recorder("second", log, "head_dim 48")], [])
    graph = trace(lambda x: x.relu().relu(), torch.ones(2)).graph
    manager(graph)
    manager(graph)
    assert log == ["first", "second"] * 2
    first, second = manager.totals()
    assert dict(first.fired) == {"relu": 4}
    assert not first.declined
    assert dict(second.declined) == {("relu", "head_dim 48"): 4}
    assert "declined 4 x relu: head_dim 48" in manager.explain()
    assert len(manager.reports) == 2


def test_a_graph_without_anything_of_ours_leaves_no_report():
    manager = PassManager([Recorder("first", [])], [])
    manager(trace(lambda x: x + 1, torch.ones(2)).graph)
    assert manager.reports == []


def test_uuid_follows_names_order_and_sources(tmp_path):
    source = tmp_path / "body.py"
    source.write_text("1")
    first, second = Recorder("first", []), Recorder("second", [])
    uuids = [PassManager(passes, [source]).uuid for passes in ([first], [first, second], [second, first])]
    assert len(set(uuids)) == 3
    assert PassManager([first], [source]).uuid == uuids[0]
    source.write_text("2")
    assert PassManager([first], [source]).uuid != uuids[0]


def test_inlining_replaces_the_node_by_its_body():
    module = trace(lambda x, w: ops.rms_norm(x, w, 1e-6) * 2, torch.ones(3, 8), torch.ones(8))
    target = torch.ops.csa2.rms_norm.default
    assert target in {node.target for node in module.graph.nodes}
    report = InlineNamedOps({target: ops.rms_norm_body}, {}).run(module.graph)
    assert dict(report.fired) == {"csa2::rms_norm": 1}
    assert target not in {node.target for node in module.graph.nodes}
    module.recompile()
    x, w = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(module(x, w), ops.rms_norm(x, w, 1e-6) * 2, rtol=1e-6, atol=1e-6)


def test_a_device_with_a_body_of_its_own_gets_that():
    target = torch.ops.csa2.rms_norm.default
    module = trace(lambda x, w: ops.rms_norm(x, w, 1e-6), torch.ones(3, 8), torch.ones(8))
    InlineNamedOps({target: ops.rms_norm_body}, {(target, "cpu"): lambda x, w, eps: x + w}).run(module.graph)
    module.recompile()
    assert torch.equal(module(torch.ones(3, 8), torch.ones(8)), torch.full((3, 8), 2.0))
