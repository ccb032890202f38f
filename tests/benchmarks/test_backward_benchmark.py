"""The benchmark of the backward pass: it runs on CPU, and its judge sees a wrong gradient."""

import json
from dataclasses import replace
from pathlib import Path

import attention_parts
import backward
import pytest
import torch
import typer

from csa2_compiled import CSA2Config

CFG = replace(CSA2Config.tiny(), sliding_window=16, index_topk=8, candidate_topk_blocks=3, max_position_embeddings=64)


def test_it_runs_on_cpu_and_shows_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "backward.json"
    backward.main(seq_len="24", repeats=1, output=path)
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert (row["tokens"], row["variant"], row["reason"]) == (24, "eager", None)
    assert row["ms"] > 0
    assert row["forward_ms"] > 0
    assert row["errors"].keys() == set(backward.GRADIENTS)
    assert max(row["errors"].values()) < 1e-5
    capsys.readouterr()
    backward.main(show=path)
    assert "eager" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="--sweep"):
        backward.main(sweep=True, output=path)


@pytest.mark.parametrize("name", backward.GRADIENTS)
def test_the_judge_sees_a_wrong_gradient(name: str):
    inputs = attention_parts.make_inputs(CFG, 41, torch.float32, torch.device("cpu"))
    grad_out = torch.randn_like(inputs.q)
    leaves = backward.leaves_of(inputs)
    core = backward.variants(inputs, compiles=False)["eager"]()
    gradients = dict(zip(backward.GRADIENTS, backward.training_step(core, leaves, grad_out)[1:], strict=True))
    expected = backward.exact_gradients(inputs, grad_out)
    assert max(backward.errors_of(inputs, tuple(gradients.values()), expected).values()) < 1e-5
    gradients[name] = gradients[name] * 1.01
    errors = backward.errors_of(inputs, tuple(gradients.values()), expected)
    assert {other for other, error in errors.items() if error > 1e-3} == {name}


def test_every_choice_of_tiles_changes_fields_that_exist():
    pytest.importorskip("triton")
    from csa2_compiled.passes.kernels.sparse_attention_backward import BackwardTiles

    choices = backward.tile_choices()
    assert {kernel for kernel, _ in choices} == {backward.FIRST, backward.SECOND, backward.THIRD, backward.WHOLE}
    for _, fields in choices:
        replace(BackwardTiles(), **fields)
