"""`csa2 bench compile` and `csa2 compile-cache`: what they print, write and refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from compile_measurements import DEEP, EACH, LENGTHS, make_measurement, make_report
from typer.testing import CliRunner

from csa2_compiled import cli_bench, compile_report
from csa2_compiled.cli import app
from csa2_compiled.compile_cache import CompileCacheContents
from csa2_compiled.compile_measure import Case
from csa2_compiled.compile_report import CompileReport, to_dict


def invoke(*arguments: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def write_report(path: Path, **fields: object) -> Path:
    measurements = make_measurement(**fields), make_measurement(LENGTHS, recompilations=("not kwargs",))
    path.write_text(json.dumps(to_dict(make_report(*measurements))))
    return path


@pytest.fixture
def old(tmp_path) -> Path:
    return write_report(tmp_path / "old.json")


def test_show_prints_times_counts_reasons_and_targets(old):
    result = invoke("bench", "compile", "--show", old)
    assert result.exit_code == 0, result.output
    assert "CPU, 2 threads, torch 2.13.0" in result.stdout
    (times,) = [line.split()[-9:] for line in result.stdout.splitlines() if "cold" in line and "9.75" in line][:1]
    assert times == ["0.00", "0.00", "0.00", "0.25", "9.75", "0.00", "0.00", "0.00", "10.00"]
    assert f"{LENGTHS.name} compiled again: not kwargs" in result.stdout
    assert "our passes / compile time, at most: 0.025, at most 0.05: reached" in result.stdout
    assert "warm / cold: -, at most 0.1: not measured" in result.stdout
    assert "compilations for 128 to 8192 tokens and decode: 6, at most 4: NOT reached" in result.stdout


def test_compare_fails_past_the_threshold_only(old, tmp_path):
    slower = write_report(tmp_path / "slower.json", seconds=14.0)
    result = invoke("bench", "compile", "--show", slower, "--compare", old)
    assert result.exit_code == 1
    assert "1 of 10 figures grew (times: by more than a factor of 1.3)" in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if "GREW" in line]
    assert "compile seconds" in row
    assert invoke("bench", "compile", "--show", slower, "--compare", old, "--threshold", "1.5").exit_code == 0
    assert invoke("bench", "compile", "--show", old, "--compare", old).exit_code == 0
    more = write_report(tmp_path / "more.json", launches={"generated": 13, "library": 8})
    assert invoke("bench", "compile", "--show", more, "--compare", old, "--threshold", "9").exit_code == 1


@pytest.fixture
def chosen(monkeypatch) -> list[Case]:
    """The cases that the command would measure; each gets a made-up measurement, the deep stack a failure."""
    cases: list[Case] = []

    def run(asked, on_case, time_limit, command, on_report) -> CompileReport:
        cases.extend(asked)
        for case in asked:
            on_case(case)
        failed = {case.name: "exit code 1: MemoryError" for case in asked if case == DEEP}
        report = make_report(*(make_measurement(case) for case in asked if case != DEEP))
        return replace(report, not_measured=failed, command=command)

    monkeypatch.setattr(compile_report, "run_cases", run)
    monkeypatch.setattr(cli_bench, "run_obstacle", lambda device: None)
    return cases


def test_only_chooses_cases_and_json_and_chart_are_written(chosen, tmp_path):
    pytest.importorskip("matplotlib")
    json_path, chart = tmp_path / "new.json", tmp_path / "chart.png"
    result = invoke("bench", "compile", "--only", "one of each", "--json", json_path, "--chart", chart)
    assert result.exit_code == 0, result.output
    assert chosen == [replace(EACH, start=start) for start in ("cold", "warm", "portable")]
    assert f"measuring {EACH.name}" in result.stderr
    assert [m.case for m in compile_report.read_report(json_path).measurements] == chosen
    assert {target["name"] for target in json.loads(json_path.read_text())["targets"]} >= {"graph breaks"}
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_json_has_the_cases_so_far_when_the_measuring_is_stopped(monkeypatch, tmp_path):
    def run(asked, on_case, time_limit, command, on_report):
        on_report(make_report(make_measurement(EACH)))
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_report, "run_cases", run)
    monkeypatch.setattr(cli_bench, "run_obstacle", lambda device: None)
    path = tmp_path / "new.json"
    assert invoke("bench", "compile", "--json", path).exit_code == 130
    assert [m.case for m in compile_report.read_report(path).measurements] == [EACH]


def test_a_case_that_fails_makes_the_command_fail(chosen):
    result = invoke("bench", "compile", "--only", "layers, regional")
    assert result.exit_code == 1
    assert f"Not measured: {DEEP.name}: exit code 1: MemoryError" in result.stdout


def test_full_is_everything(chosen):
    invoke("bench", "compile", "--full")
    assert chosen == list(compile_report.all_cases("cpu"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "nothing"], "--only: no case has 'nothing' in its name"),
        (["--threshold", "0.9"], "--threshold: 0.9 is less than 1"),
        (["--compare", "{folder}/none.json"], "--compare: {folder}/none.json cannot be read"),
        (["--show", "{folder}/bad.json"], "--show: {folder}/bad.json is not valid JSON"),
        (["--show", "{folder}/deep.json", "--compare", "{folder}/old.json"], "--compare: the older report has none"),
        (["--json", "{folder}/none/new.json"], "--json: {folder}/none is no directory"),
        (["--chart", "{folder}"], "--chart: {folder} is a directory"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(chosen, old, tmp_path, arguments, problem):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text(json.dumps(to_dict(make_report(make_measurement(DEEP)))))
    result = invoke("bench", "compile", *(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert f"csa2 bench compile: {problem.format(folder=tmp_path)}" in result.stderr
    assert chosen == []


def test_load_refuses_with_the_reason(tmp_path):
    (tmp_path / "file.bin").write_bytes(b"something else")
    for name, problem in (("file.bin", "is no compile cache"), ("none.bin", "cannot be read")):
        result = invoke("compile-cache", "load", tmp_path / name)
        assert result.exit_code == 2
        assert "csa2 compile-cache load: FILE: " in result.stderr
        assert problem in result.stderr


def test_load_says_what_it_loaded(tmp_path, monkeypatch):
    contents = CompileCacheContents({"inductor": 5, "aot_autograd": 4}, 12, 3 * 2**20)
    monkeypatch.setattr(cli_bench, "load_compile_cache", lambda path: contents)
    result = invoke("compile-cache", "load", tmp_path / "file.bin")
    assert result.exit_code == 0, result.output
    assert "4 aot_autograd artifacts, 5 inductor artifacts, 12 C++ libraries, 3.0 MiB" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{folder}/none/file.bin"], "FILE: {folder}/none is no directory"),
        (["{folder}"], "FILE: {folder} is a directory"),
        (["{folder}/file.bin", "--seq-len", "0"], "--seq-len: 0 is not within"),
        (["{folder}/file.bin", "--passes", "x"], "--passes: names 'x'"),
        (["{folder}/file.bin", "--config", "{folder}/none.json"], "--config: {folder}/none.json does not exist"),
    ],
)
def test_save_refuses_before_it_compiles(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.setattr(cli_bench, "_compile", lambda *_: pytest.fail("compiled"))
    result = invoke("compile-cache", "save", *(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert f"csa2 compile-cache save: {problem.format(folder=tmp_path)}" in result.stderr
    assert list(tmp_path.iterdir()) == []
