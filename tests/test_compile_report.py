"""What compiling costs: measured once in a process of its own, counted, compared."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from compile_measurements import DEEP, EACH, LENGTHS, make_measurement, make_report
from torch._dynamo.utils import ChromiumEventLogger, dynamo_timed

from csa2_compiled import compile_report
from csa2_compiled.compile_measure import ROLES, Case, Measurement, stack_config
from csa2_compiled.compile_report import CompareError, compare, read_report, run_case, run_cases, targets, to_dict
from csa2_compiled.passes.inductor import compile_phases, launches_in

SMALL = Case("window", "layer", lengths=(48, 32), layout="plain")


@pytest.fixture(scope="session")
def measured(tmp_path_factory) -> Measurement:
    """SMALL, in a process of its own, with the caches of this machine: its counts do not depend on them."""
    folder = tmp_path_factory.mktemp("measured")
    case, result = folder / "case.json", folder / "result.json"
    case.write_text(json.dumps(asdict(SMALL)))
    command = [sys.executable, "-m", "csa2_compiled.compile_measure", str(case), str(result)]
    path = os.pathsep.join(filter(None, (str(Path(compile_report.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    return compile_report._measurement(json.loads(result.read_text()))


def test_a_layer_is_one_graph_without_breaks(measured):
    assert measured.case == SMALL
    assert measured.graph_breaks == {}
    assert measured.graphs_after["48"] == 1
    assert measured.guards > 100  # of parameters and inputs, in both graphs


def test_another_length_compiles_again_once_and_says_why(measured):
    assert measured.graphs == measured.graphs_after["32"] == 2  # and calling both once more compiled nothing
    (reason,) = measured.recompilations
    assert "48" in reason
    assert "32" in reason
    assert "\n" not in reason


def test_a_layer_launches_few_kernels(measured):
    # Projections of q (two), kv and output (two), and two products of the attention; norms, RoPE, quantization,
    # softmax and inverse RoPE between them.
    assert measured.launches["library"] == 7
    assert 1 <= measured.launches["generated"] <= 6  # 6 in torch 2.11, 2.13 and 2.14
    assert measured.kernels_generated >= measured.launches["generated"]


def test_seconds_are_split_without_rest(measured):
    assert sum(measured.phases.values()) == pytest.approx(measured.compile_seconds)
    assert set(measured.phases) == set(compile_report.PHASE_NAMES)
    assert measured.phases["dynamo"] > 0
    assert sum(measured.passes.values()) <= measured.phases["passes"]
    assert measured.phases["rest"] < 0.2 * measured.compile_seconds + 0.5
    assert measured.peak_device is None


@pytest.mark.slow
def test_warm_and_portable_starts_take_every_graph_from_a_cache():
    case = replace(SMALL, lengths=(48,))
    cases = [replace(case, start=start) for start in ("warm", "portable")]
    begun: list[str] = []
    so_far: list[int] = []
    report = run_cases(
        cases,
        lambda case: begun.append(case.start),
        on_report=lambda report: so_far.append(len(report.measurements)),
    )
    assert report.not_measured == {}
    assert so_far == [1, 2, 3]
    assert begun == ["cold", "warm", "portable"]
    cold, warm, portable = report.measurements
    assert (cold.graphs, warm.graphs, portable.graphs) == (1, 1, 1)
    assert (cold.cache_hits, warm.cache_hits, portable.cache_hits) == (0, 1, 1)
    assert cold.launches == warm.launches == portable.launches
    assert sum(cold.passes.values()) > 0
    assert sum(warm.passes.values()) == sum(portable.passes.values()) == 0
    assert warm.phases["kernels"] < cold.phases["kernels"]
    assert portable.phases["load"] > 0


def test_a_case_that_fails_has_its_reason(tmp_path):
    reason = run_case(replace(SMALL, passes="nothing"), tmp_path)
    assert isinstance(reason, str)
    assert reason.startswith("exit code 1: ValueError: passes names 'nothing'")


def test_time_limit_leaves_cases_out_and_says_so():
    report = run_cases([SMALL], time_limit=-1.0)
    assert report.measurements == ()
    assert report.not_measured == {SMALL.name: "the time limit had passed"}


@pytest.mark.parametrize("fields", [{"what": "40 layers"}, {"mode": "region"}, {"decode": True}])
def test_impossible_cases_are_refused(fields):
    with pytest.raises(ValueError, match=r"allowed are|needs a stack"):
        replace(SMALL, **fields)


def test_cases_have_names_of_their_own():
    for device in ("cpu", "cuda"):
        everything, chosen = compile_report.all_cases(device), compile_report.default_cases(device)
        assert len({case.name for case in everything}) == len(everything)
        assert len({case.name for case in chosen}) == len(chosen)
        assert {case.what for case in chosen} >= {*ROLES, "1 layer", "4 layers", "40 layers"}
        assert set(chosen) <= set(everything)


def test_stacks_have_the_roles_of_their_names():
    cfg = stack_config("one of each role", "cpu", 256)
    names = [name.partition(" ")[0] for name in ROLES]
    assert [role.value for role in cfg.layer_roles] == names
    assert stack_config("40 layers", "cpu", 256).layer_roles == stack_config("40 layers", "cuda", 256).layer_roles


def test_phases_count_each_second_for_the_innermost():
    before = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end
    with compile_phases() as seconds:
        with dynamo_timed("backend_compile"), dynamo_timed("something unnamed"):
            time.sleep(0.02)
            with dynamo_timed("compile_file"):
                time.sleep(0.04)
        with dynamo_timed("mm_template_autotuning"):
            time.sleep(0.01)
    assert (ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end) == before
    assert 0.02 <= seconds["aot_autograd"] < 0.04 <= seconds["kernels"]
    assert seconds["autotuning"] >= 0.01
    assert seconds["dynamo"] == seconds["inductor"] == seconds["passes"] == 0


def test_launches_are_read_from_a_wrapper():
    code = '''
cpp_fused_0 = async_compile.cpp_pybinding([], r"""cpp_fused_0(inside, a, kernel);""")
triton_poi_1 = async_compile.triton("triton_poi_1", """def triton_poi_1(): extern_kernels.mm()""")
class Runner:
    def call(self, args):
        cpp_fused_0(buf0, buf1)
        triton_poi_1.run(buf0, 4, stream=stream0)
        triton_poi_1.run(buf1, 4, stream=stream0)
        extern_kernels.mm(buf0, reinterpret_tensor(buf1, (1,), (1,), 0), out=buf2)
        buf3 = torch.ops.aten.topk.default(buf2, 4)
        assert_size_stride(buf3, (4,), (1,))
'''
    assert launches_in(code) == {"generated": 3, "library": 2}


def test_targets_come_from_their_cases():
    report = make_report(
        make_measurement(EACH, 10.0, passes=0.6),
        make_measurement(replace(EACH, start="warm"), 0.9, passes=0.0),
        make_measurement(DEEP, 14.0),
        make_measurement(LENGTHS, graphs=3, graphs_after={"128": 1, "decode": 3}),
    )
    figures = {target.name.partition(",")[0]: (target.value, target.met) for target in targets(report)}
    assert figures == {
        "40 layers / one layer of each role": (pytest.approx(1.4), False),
        "warm / cold": (pytest.approx(0.09), True),
        "portable / cold": (None, None),
        "our passes / compile time": (pytest.approx(0.06), False),
        "graph breaks": (0, True),
        "compilations for 128 to 8192 tokens and decode": (3, True),
    }


def test_compare_allows_time_a_factor_and_counts_nothing():
    old = make_report(make_measurement())
    slower, much_slower = make_measurement(seconds=12.9), make_measurement(seconds=13.1)
    assert not any(difference.grown for difference in compare(make_report(slower), old, 1.3))
    assert [d.figure for d in compare(make_report(much_slower), old, 1.3) if d.grown] == ["compile seconds"]
    grown = {
        "graph breaks": {"graph_breaks": {"a print": 1}},
        "graphs": {"graphs": 7},
        "recompilations": {"recompilations": ("L['x'].size()[0] == 3",)},
        "launches": {"launches": {"generated": 13, "library": 8}},
    }
    for figure, fields in grown.items():
        new = make_report(make_measurement(**fields))
        assert [d.figure for d in compare(new, old, 1.3) if d.grown] == [figure]
        assert not any(d.grown for d in compare(old, new, 1.3))  # fewer is fine
    with pytest.raises(CompareError, match="none of these cases"):
        compare(make_report(make_measurement(DEEP)), old, 1.3)


def test_reports_survive_json(tmp_path):
    report = make_report(make_measurement(), make_measurement(LENGTHS, recompilations=("not kwargs",)))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(to_dict(report)))
    assert read_report(path) == report
    for content, problem in (("{", "not valid JSON"), ("[]", "no report"), ('{"date": 1}', "no report")):
        path.write_text(content)
        with pytest.raises(CompareError, match=problem):
            read_report(path)
    with pytest.raises(CompareError, match="cannot be read"):
        read_report(tmp_path)


def test_the_chart_stacks_all_seconds():
    pytest.importorskip("matplotlib")
    figure = compile_report.draw(make_report(make_measurement(seconds=10.0), make_measurement(DEEP, 14.0)))
    (axes,) = figure.axes
    assert len(axes.patches) == 2 * len(compile_report.PHASE_NAMES)
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(24.0)
