"""`evaluate` and `csa2 evaluate`: three ways to attend, and recall, each against something computed otherwise."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from csa2_compiled import (
    CheckpointError,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2InputError,
    evaluate,
    generate_report,
    load_demo_model,
    model_files,
    save_model,
)
from csa2_compiled.cli import app
from csa2_compiled.distillation import DistillationLosses, enable_distillation
from csa2_compiled.quality import reader
from csa2_compiled.train_data import TrainDataError

# Window, full r=2, reuse, full r=1 with candidates, reindex, reuse.
CFG = replace(
    CSA2Config.tiny(),
    hidden_size=64,
    head_dim=32,
    index_head_dim=32,
    num_hidden_layers=6,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    candidate_topk_blocks=3,
    candidate_block_size=4,
    index_topk=8,
    sliding_window=6,
    max_position_embeddings=128,
    initializer_range=0.1,
)
DOCUMENTS = [bytes(range(32, 110)), b"to be or not to be, that is the question", b"x"]
TOKENS = 48


def make_model(cfg: CSA2Config = CFG) -> CSA2ForCausalLM:
    torch.manual_seed(0)
    return CSA2ForCausalLM(cfg, dtype=torch.float32)


def bits_alone(model: CSA2ForCausalLM) -> float:
    """Of each window by itself, unpacked."""
    nats, count = 0.0, 0
    for document in DOCUMENTS:
        for first in range(0, len(document), TOKENS):
            ids = torch.tensor([list(document[first : first + TOKENS])])
            if ids.shape[1] > 1:
                with torch.no_grad():
                    nats += cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum").item()
                count += ids.shape[1] - 1
    return nats / count / math.log(2)


def test_dense_is_a_model_that_selects_every_position() -> None:
    model = make_model()
    every = make_model(replace(CFG, index_topk=TOKENS, candidate_topk_blocks=TOKENS // 4))
    read: list[tuple[int, int]] = []
    report = evaluate(model, DOCUMENTS, TOKENS, batch_size=2, on_batch=lambda *so_far: read.append(so_far))
    total = sum(map(len, DOCUMENTS))
    assert 0 < read[0][0] < read[-1][0] == total
    assert {every for _, every in read} == {total}
    assert report.bits_per_byte["sparse"] == pytest.approx(bits_alone(model), abs=1e-5)
    assert report.bits_per_byte["dense"] == pytest.approx(bits_alone(every), abs=1e-5)
    assert abs(report.bits_per_byte["sparse"] - report.bits_per_byte["dense"]) > 1e-4
    assert report.predicted_bytes == sum(map(len, DOCUMENTS)) - 4  # each window's first byte


def test_window_is_a_model_of_window_layers() -> None:
    nothing: dict[str, Any] = {"index_source_layer_ids": (), "candidate_source_layer_id": -1}
    model = make_model(replace(CFG, compress_rope_theta=CFG.rope_theta))  # window layers have that base
    narrow = replace(CFG, compress_ratios=(0,) * 6, kv_source_layer_ids=(), **nothing)
    windows = make_model(narrow)
    windows.load_state_dict(model.state_dict(), strict=False)
    report = evaluate(model, DOCUMENTS, TOKENS, 2, attends=["window"])
    assert report.bits_per_byte == {"window": pytest.approx(bits_alone(windows), abs=1e-5)}
    assert (report.recall, report.layers) == (None, ())


def test_recall_is_that_of_the_attention_computed_by_hand() -> None:
    model, ids = make_model(), torch.tensor([list(DOCUMENTS[0][:TOKENS])])
    report = evaluate(model, [bytes(ids[0].tolist())], TOKENS)
    expected = {}

    def run_block(block: Any, x: Any, state: Any, tokens: Any) -> Any:
        output, layer = block(x, state, tokens), block.attn
        if layer.layer_idx in CFG.index_source_layer_ids:
            publication = output.state.of_ratio(layer.ratio)
            normed = block.attn_norm(x)
            rotations = layer.rotary(tokens.positions)
            q = layer.wq_b(layer.q_norm(layer.wq_a(normed))).unflatten(-1, (-1, CFG.head_dim))
            q = torch.ops.csa2.apply_rope(q, rotations, False)[0]
            window, shares = layer.window_kv(normed, rotations)[0], []
            for s in range(TOKENS):
                seen = (s + 1) // layer.ratio
                if seen <= CFG.index_topk:
                    continue
                keys = torch.cat([publication.compressed_kv[0, :seen], window[max(0, s - 5) : s + 1]])
                logits = torch.cat([q[s] @ keys.T / math.sqrt(CFG.head_dim), layer.attn_sink[:, None]], 1)
                best = logits.softmax(1)[:, :seen].sum(0).topk(CFG.index_topk).indices.tolist()
                chosen = set(publication.topk_indices[0, s].tolist())
                shares.append((len(chosen & set(best)) / CFG.index_topk, CFG.index_topk / seen))
            expected[layer.layer_idx] = shares
        return output

    with torch.no_grad():
        model(ids, run_block=run_block)
    assert [layer.layer for layer in report.layers] == [1, 3, 4]
    for layer in report.layers:
        shares = expected[layer.layer]
        assert layer.queries == len(shares) == TOKENS - CFG.index_topk * layer.ratio - (layer.ratio - 1)
        assert layer.recall == pytest.approx(sum(share for share, _ in shares) / len(shares), abs=1e-6)
        assert layer.random == pytest.approx(sum(share for _, share in shares) / len(shares), abs=1e-6)
    recalls = [layer.recall for layer in report.layers if layer.recall is not None]
    assert report.recall == pytest.approx(sum(recalls) / 3)


@pytest.mark.parametrize("attends", ["sparse", "dense", "window"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_reader_leaves_the_distillation_as_it_is(attends: Any, inner: bool) -> None:
    """The attention adds nothing to the hidden states here, so that every reader hands the same ones on."""
    model, ids = make_model(), torch.tensor([list(DOCUMENTS[0][:TOKENS])] * 2)
    for layer in model.layers:
        nn.init.zeros_(layer.attn.wo_b.weight)
    enable_distillation(model)
    results = []
    for run_block in (None, checkpointed(attends) if inner else reader(attends)):
        model.zero_grad()
        losses = DistillationLosses("dense", inner=run_block)
        logits = model(ids, document_ids=ids.new_ones(ids.shape), run_block=losses.run_block)
        (logits.square().mean() + losses.total()).backward()
        results.append((losses.by_layer, {n: p.grad for n, p in model.named_parameters() if ".indexer." in n}))
    (expected, expected_gradients), (got, gradients) = results
    assert list(got) == list(expected) == [1, 3, 4]
    for layer_idx, loss in expected.items():
        assert loss > 1e-4
        torch.testing.assert_close(got[layer_idx], loss, rtol=1e-6, atol=0)
    assert any(name.startswith("layers.4.") for name in gradients)
    for name, gradient in expected_gradients.items():
        assert gradient is not None
        assert (gradient != 0).any(), name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-9)


def checkpointed(attends: Any) -> Any:
    """The same reader in a backward pass that runs each block again."""
    return lambda *inputs: checkpoint(reader(attends), *inputs, use_reentrant=False)


def test_too_short_a_text_has_no_recall() -> None:
    report = evaluate(make_model(), [b"abcdefg"], TOKENS)
    assert report.recall is None
    assert {layer.queries for layer in report.layers} == {0}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"seq_len": 1}, "seq_len is 1; it must be an integer within 2 and 128"),
        ({"seq_len": 129}, "seq_len is 129"),
        ({"batch_size": 0}, "batch_size is 0; it must be an integer within 1"),
        ({"attends": ["sparse", "all"]}, "attends is .*; it must name some of sparse, dense, window"),
        ({"attends": []}, r"attends is \[\]"),
        ({"attends": "dense"}, "attends is the string 'dense'; it must be a sequence of some of sparse, dense, window"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(CSA2InputError, match=problem):
        evaluate(make_model(), DOCUMENTS, **{"seq_len": TOKENS, **arguments})
    with pytest.raises(TrainDataError, match="nothing to predict"):
        evaluate(make_model(), [b"a"], TOKENS)
    for odd, name in (["text"], "str"), ("text", "str"), (b"text", "int"), ([b"text", None], "NoneType"):
        with pytest.raises(TrainDataError, match=f"^documents: they hold an object of type {name}; each must be bytes"):
            evaluate(make_model(), odd, TOKENS)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(make_model(), tmp_path / "model")
    (tmp_path / "text").write_bytes(b"\f".join(DOCUMENTS))
    return tmp_path


def invoke(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_and_writes_the_report(folder: Path) -> None:
    usual = ("evaluate", "--text", folder / "text", "--model", folder / "model", "--seq-len", TOKENS)
    result = invoke(*usual, "--json", folder / "report.json")
    assert result.exit_code == 0, result.output
    report = evaluate(make_model(), DOCUMENTS, TOKENS)
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert f"{report.predicted_bytes} bytes predicted" in result.stdout
    for value in report.bits_per_byte.values():
        assert f"{value:.4f}" in result.stdout
    for layer in report.layers:
        assert f"{layer.recall:.3f}" in result.stdout


def test_the_command_refuses_by_name(folder: Path) -> None:
    usual = ("evaluate", "--text", folder / "text", "--model", folder / "model", "--seq-len", TOKENS)
    for arguments, problem in (
        (("--seq-len", 1), "--seq-len: is 1"),
        (("--seq-len", 129), "--seq-len: 129 is not within"),
        (("--batch-size", 0), "--batch-size: is 0"),
        (("--text", folder / "none"), "--text: "),
        (("--json", folder), "--json: "),
        (("--model", folder), "--model: "),
    ):
        result = invoke(*usual, *arguments)
        assert result.exit_code == 2, result.output
        assert problem in result.stderr


def test_the_shipped_model_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEMO_FOLDER", folder / "model")
    model = load_demo_model()
    assert not model.training
    assert torch.equal(
        nn.utils.parameters_to_vector(model.parameters()), nn.utils.parameters_to_vector(make_model().parameters())
    )
    assert invoke("evaluate", "--text", folder / "text", "--seq-len", 16).exit_code == 0
    texts = [
        invoke("generate", "--eager", "--prompt", "to be", "--max-new-tokens", 5, *more).stdout
        for more in ((), ("--model", folder / "model"))
    ]
    assert texts[0] == texts[1] != ""


def test_an_installation_without_the_model_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEMO_FOLDER", folder)
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors: the small model .* is not installed"):
        load_demo_model()
    with pytest.raises(generate_report.BadArgumentError, match="--model names one"):
        generate_report.shipped_model()
    for command, *arguments in (("generate", "--prompt", "x"), ("masks", "--text", folder / "text")):
        result = invoke(command, *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"csa2 {command}: --model: ")
