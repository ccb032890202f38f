"""Training: the loss falls, a resumed run is the uninterrupted one, and checkpoints are whole or refused."""

import hashlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import make_config
from torch import nn

from csa2_compiled import (
    CheckpointError,
    CSA2ForCausalLM,
    CSA2InputError,
    DistillationLosses,
    TrainConfig,
    TrainConfigError,
    TrainDataError,
    Trainer,
    compile_model,
    enable_distillation,
    load_attention,
    load_model,
    save_model,
    train_checkpoint,
)
from csa2_compiled.checkpointing import checkpoint_block
from csa2_compiled.model import CSA2Block
from csa2_compiled.model_files import read_tensors, write_tensors
from csa2_compiled.train import (
    StepReport,
    TrainingError,
    parameter_groups,
    summed_loss,
    train,
)
from csa2_compiled.train_checkpoint import latest_checkpoint

CFG = make_config((0, 2, 2), (1,), (1,))  # window, full, reuse
DOCUMENTS = [
    b"the cat sat on the mat and the dog sat on the cat. " * 6,
    b"abcabcabcabcabc",
    b"to be or not to be. " * 4,
]
BASE = TrainConfig(steps=8, batch_size=2, seq_len=32, warmup=2, val_fraction=0.1, val_every=3, save_every=4, lr=5e-3)


def make_trainer(out: Path, documents: list[bytes] = DOCUMENTS, cfg: Any = CFG, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(CSA2ForCausalLM(cfg, dtype=torch.float32), documents, replace(BASE, **settings), out)


def run(trainer: Trainer) -> list[StepReport]:
    """All steps that remain, without their times."""
    reports: list[StepReport] = []
    assert train(trainer, reports.append)
    return [replace(report, seconds=0.0) for report in reports]


def state_of(trainer: Trainer) -> list[Any]:
    """Everything that a refused checkpoint must leave alone, as comparable values."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [*trainer.model.state_dict().values(), *trainer._computing.state_dict().values(), *states]
    rng = (random.getstate(), bytes(torch.get_rng_state().tolist()))
    return [trainer.steps_done, trainer.position, rng, *map(bits, tensors)]


def bits(tensor: torch.Tensor) -> str:
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a whole run of 8 steps, with checkpoints 4 and 8."""
    out = tmp_path_factory.mktemp("finished")
    run(make_trainer(out))
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls(tmp_path: Path, dtype: str) -> None:
    trainer = make_trainer(tmp_path, steps=30, dtype=dtype, lr=1e-2)
    before = trainer.validate()
    losses = [trainer.step().loss for _ in range(30)]
    after = trainer.validate()
    assert losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert sum(losses[-5:]) / 5 < 3.0
    assert before is not None
    assert after is not None
    assert after < before - 2.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, dtype: str) -> None:
    whole = make_trainer(tmp_path / "whole", dtype=dtype)
    expected = run(whole)
    assert [report.step for report in expected] == list(range(1, 9))
    assert [report.val_bits_per_byte is not None for report in expected] == [s in (3, 6, 8) for s in range(1, 9)]
    resumed = make_trainer(tmp_path / "resumed", dtype=dtype)
    torch.manual_seed(99)
    random.seed(99)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.fill_(0.5)
    resumed.load(tmp_path / "whole" / "checkpoint-4")
    assert run(resumed) == expected[4:]
    assert state_of(resumed) == state_of(whole)
    assert latest_checkpoint(tmp_path / "resumed").name == "checkpoint-8"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_that_distills_is_the_uninterrupted_one(tmp_path: Path, dtype: str) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "distill": True, "distill_warmup": 6, "checkpointing": True}
    whole = make_trainer(tmp_path / "whole", **settings)
    expected = run(whole)
    assert all(report.distillation_loss for report in expected)
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.load(tmp_path / "whole" / "checkpoint-4")
    assert run(resumed) == expected[4:]
    assert state_of(resumed) == state_of(whole)
    with pytest.raises(CheckpointError, match=r"distill is False; .* is of a run with True"):
        make_trainer(tmp_path, dtype=dtype).load(tmp_path / "whole" / "checkpoint-4")


def test_distillation_changes_the_indexers_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"grad_clip": 0.0, "warmup": 0, "weight_decay": 0.0}
    plain, distilled = make_trainer(tmp_path, **settings), make_trainer(tmp_path, **settings, distill=True)
    drawn = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    reports = [trainer.step() for trainer in (plain, distilled)]
    assert reports[0].loss == reports[1].loss
    assert reports[0].distillation_loss is None
    states = plain.model.state_dict(), distilled.model.state_dict()
    for name, before in drawn.items():
        of_indexer = ".indexer." in name
        assert torch.equal(states[0][name], states[1][name]) != of_indexer, name
        assert torch.equal(states[0][name], before) == of_indexer, name


def test_distillation_leaves_the_clipping_of_the_others_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"grad_clip": 0.01, "warmup": 0}
    plain = make_trainer(tmp_path, **settings)
    distilled = make_trainer(tmp_path, **settings, distill=True, distill_weight=1e4)
    norms: list[float] = []

    def measure(*_: Any) -> None:
        named = distilled._trained().items()
        gradients = [p.grad for name, p in named if ".indexer." in name and p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())

    distilled.optimizer.register_step_pre_hook(measure)
    assert plain.step().grad_norm == distilled.step().grad_norm > 0.01
    assert norms == [pytest.approx(0.01, rel=1e-4)]
    states = plain.model.state_dict(), distilled.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0] if ".indexer." not in name)


def test_distillation_may_leave_steps_out(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", distill=True, distill_every=3, save_every=2)
    expected = run(whole)
    assert [report.distillation_loss is not None for report in expected] == [s in (1, 4, 7) for s in range(1, 9)]
    resumed = make_trainer(tmp_path / "resumed", distill=True, distill_every=3, save_every=2)
    resumed.load(tmp_path / "whole" / "checkpoint-2")
    assert run(resumed) == expected[2:]
    assert state_of(resumed) == state_of(whole)


def test_distillation_has_two_stages(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, distill=True, distill_warmup=1)
    stages = []
    for _ in range(2):
        losses = trainer._distillation()
        assert losses is not None
        stages.append(losses.stage)
        trainer.step()
    assert stages == ["dense", "sparse"]


def test_a_distilled_indexer_scores_more_like_the_attention_than_a_drawn_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, distill=True, lr=1e-2, steps=40)
    drawn = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items() if ".indexer." in name}
    for _ in range(40):
        trainer.step()
    batch, _ = trainer.data.batch(trainer.position, 2)
    divergences = []
    for tensors in ({}, drawn):
        trainer.model.load_state_dict(tensors, strict=False)
        losses = trainer._distillation()
        assert losses is not None
        with torch.no_grad():
            trainer.model(batch.input_ids, document_ids=batch.document_ids, run_block=losses.run_block)
        divergences.append(losses.total().item())
    assert divergences[0] < 0.7 * divergences[1]


def test_the_distillation_loss_is_weighted(tmp_path: Path) -> None:
    norms = []
    for weight in (1.0, 3.0):
        weighted = make_trainer(tmp_path, distill=True, distill_weight=weight)
        weighted._backward(weighted.data.batch(weighted.position, 2)[0])
        named = weighted.model.named_parameters()
        norms.append(sum(p.grad.norm().item() for n, p in named if ".indexer." in n and p.grad is not None))
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)


@pytest.mark.slow
def test_compiled_distillation_has_the_eager_losses(tmp_path: Path) -> None:
    eager, compiled = (make_trainer(tmp_path, distill=True, compile=compile_) for compile_ in (False, True))
    for _ in range(3):
        first, second = eager.step(), compiled.step()
        assert second.loss == pytest.approx(first.loss, rel=1e-4)
        assert second.distillation_loss == pytest.approx(first.distillation_loss, rel=1e-3)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.step()
    random.seed(7)
    torch.manual_seed(7)
    path = trainer.save()
    drawn = (random.random(), random.gauss(0, 1), torch.rand(3).tolist())
    trainer.load(path)
    assert (random.random(), random.gauss(0, 1), torch.rand(3).tolist()) == drawn


def test_stopping_saves_and_ends(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_every=0)
    saved: list[Path] = []
    assert not train(trainer, on_save=saved.append, stop=lambda: trainer.steps_done == 3)
    assert saved == [tmp_path / "checkpoint-3"] == [latest_checkpoint(tmp_path)]
    assert not (tmp_path / "model.safetensors").exists()
    again = make_trainer(tmp_path, save_every=0)
    again.load(saved[0])
    assert train(again)
    assert (tmp_path / "model.safetensors").exists()


def test_the_schedule() -> None:
    cfg = TrainConfig(steps=14, warmup=4, lr=2.0, min_lr_ratio=0.1)
    rates = [cfg.learning_rate(step) for step in range(14)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[7] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2))
    assert rates[13] == pytest.approx(0.2)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert TrainConfig(steps=1, warmup=0, lr=3.0).learning_rate(0) == 3.0
    assert TrainConfig(steps=2, warmup=10, lr=1.0).learning_rate(1) == 0.2


def test_the_schedule_reaches_the_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for step in range(3):
        assert trainer.step().lr == BASE.learning_rate(step)
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {BASE.learning_rate(step)}


def test_only_matrices_decay() -> None:
    model = CSA2ForCausalLM(CFG)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model, 0.25)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert {"embed.weight", "head.weight", "layers.1.attn.compressor.wgate.weight"} <= {
        names[p] for p in decayed["params"]
    }
    assert all("norm" in names[p] or names[p].endswith("attn_sink") for p in plain["params"])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(plain["params"]) == len(trained) < len(names)
    assert all(p.requires_grad for p in decayed["params"] + plain["params"])  # not the indexer's


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_gradients_are_clipped(tmp_path: Path, clip: float) -> None:
    trainer = make_trainer(tmp_path, grad_clip=clip)
    norms: list[float] = []

    def measure(*_: Any) -> None:
        norms.append(
            nn.utils.get_total_norm([p.grad for p in trainer._trained().values() if p.grad is not None]).item()
        )

    trainer.optimizer.register_step_pre_hook(measure)
    report = trainer.step()
    assert norms == [pytest.approx(min(report.grad_norm, clip or math.inf), rel=1e-4)]


def test_bfloat16_computes_and_float32_is_trained(tmp_path: Path) -> None:
    exact, rounded = make_trainer(tmp_path), make_trainer(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    copies = dict(rounded._computing.named_parameters())
    assert copies["layers.1.attn.wkv.weight"].dtype == torch.bfloat16
    assert copies["layers.1.attn.kv_norm.weight"].dtype == torch.float32
    assert copies["layers.1.attn.compressor.wgate.weight"].dtype == torch.float32
    assert rounded.step().loss == pytest.approx(exact.step().loss, rel=2e-3)
    for name, parameter in rounded.model.named_parameters():
        assert torch.equal(copies[name], parameter.to(copies[name].dtype)), name
        assert copies[name].grad is None
    states = [state for state in rounded.optimizer.state.values() for state in state.values()]
    assert {state.dtype for state in states} == {torch.float32}


def test_bfloat16_gradients_are_those_of_float32_rounded(tmp_path: Path) -> None:
    trainers = [make_trainer(tmp_path, dtype=dtype) for dtype in ("float32", "bfloat16")]
    for trainer in trainers:
        trainer._backward(trainer.data.batch(trainer.position, 2)[0])
    exact, rounded = (
        torch.cat([p.grad.flatten() for p in t._trained().values() if p.grad is not None]) for t in trainers
    )
    assert rounded.dtype == torch.float32
    assert nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.999


def test_a_small_change_outlives_the_rounding(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dtype="bfloat16", lr=1e-7, warmup=0, weight_decay=0.0)
    before = trainer.model.head.weight.clone()
    trainer.step()
    changed = trainer.model.head.weight != before
    assert changed.float().mean() > 0.5


def test_documents_in_a_row_have_the_loss_they_have_alone(tmp_path: Path) -> None:
    documents = [b"some words of text", b"and a few others"]
    packed = make_trainer(tmp_path, documents, seq_len=36, val_fraction=0.0, batch_size=1)
    together, _ = packed._backward(packed.data.batch(packed.position, 1)[0])
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([list(document)])
        total += summed_loss(packed.model(ids)[:, :-1], ids[:, 1:]).item()
        count += len(document) - 1
    assert together == pytest.approx(total / count, rel=1e-5)


def test_validation_is_bits_per_predicted_byte(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    nn.init.zeros_(trainer.model.head.weight)
    assert trainer.validate() == pytest.approx(8)
    assert make_trainer(tmp_path, val_fraction=0.0).validate() is None


REFUSED_SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("steps", "batch_size"), (0, -1, 1.5, True)),
    "seq_len": (1, "8"),
    **dict.fromkeys(("warmup", "val_every", "save_every", "seed"), (-1, 0.5)),
    "lr": (0, -1e-3, math.nan, math.inf, "1", True),
    "min_lr_ratio": (-0.1, 1.1),
    "weight_decay": (-0.1, math.inf),
    "grad_clip": (-1.0, math.nan, False),
    "val_fraction": (-0.1, 1.0),
    "dtype": ("float16", None),
    **dict.fromkeys(("compile", "checkpointing"), ("no", 1, None)),
    "distill": (1, "dense", None),
    "distill_every": (0, 1.5, True),
    "distill_warmup": (-1, 0.5, True),
    "distill_weight": (0, -1.0, math.nan, "1"),
}


@pytest.mark.parametrize("field", REFUSED_SETTINGS)
def test_settings_that_make_no_sense_are_named(field: str) -> None:
    for value in REFUSED_SETTINGS[field]:
        with pytest.raises(TrainConfigError, match=f"^{field}: it is .*allowed is ") as raised:
            replace(BASE, **{field: value})
        assert raised.value.field == field


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainConfigError, match=r"^seq_len: it is 129; the model takes up to 128"):
        make_trainer(tmp_path, seq_len=129)
    with pytest.raises(TrainConfigError, match=r"^distill: it is True; the model has no layer that selects"):
        make_trainer(tmp_path, cfg=make_config((0,), (), ()), distill=True)
    with pytest.raises(TypeError, match="bfloat16"):
        Trainer(CSA2ForCausalLM(CFG, dtype=torch.bfloat16), DOCUMENTS, BASE, tmp_path)


def test_a_text_that_is_refused_leaves_the_model_alone(tmp_path: Path) -> None:
    model = CSA2ForCausalLM(CFG).eval()
    with pytest.raises(TrainDataError, match="documents: they hold an object of type str"):
        Trainer(model, ["some text"], replace(BASE, distill=True), tmp_path)  # type: ignore[list-item]
    assert not model.training
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".indexer." in name)


@pytest.mark.parametrize("layout", ["slots", "dense"])
def test_a_layout_without_a_gradient_is_refused_by_name(layout: str) -> None:
    model, ids = CSA2ForCausalLM(CFG, dtype=torch.float32), torch.arange(16).unsqueeze(0)
    for block in model.layers:
        block.attn.layout = layout
    with pytest.raises(CSA2InputError, match=f"^layout is {layout}, which has no gradient; set the layer's layout to"):
        model(ids)
    for regional in (False, True):
        compiled = compile_model(model, passes="none", regional=regional)
        with pytest.raises(CSA2InputError, match=f"^layout is {layout}, which has no gradient"):
            compiled(ids)
        assert compiled.compilations == 0
    with torch.no_grad():
        assert model(ids).isfinite().all()
    model.requires_grad_(False)
    assert model(ids).isfinite().all()
    x = torch.randn(1, 16, CFG.hidden_size, requires_grad=True)
    with pytest.raises(CSA2InputError, match=f"^layout is {layout}"):
        model.layers[0].attn(x)


@pytest.mark.parametrize("layout", ["slots", "dense"])
def test_such_a_layout_serves_gradients_that_do_not_go_through_the_core(layout: str) -> None:
    model, ids = CSA2ForCausalLM(CFG, dtype=torch.float32), torch.arange(16).unsqueeze(0)
    model.requires_grad_(False)
    enable_distillation(model)
    attention = model.layers[-1].attn
    attention.wo_b.requires_grad_(True)
    for block in model.layers:
        block.attn.layout = layout
    losses = DistillationLosses()
    (model(ids, run_block=losses.run_block).sum() + losses.total()).backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any(".indexer." in name for name in trained)
    model.layers[0].attn.wo_b.requires_grad_(True)  # through the layers that follow
    with pytest.raises(CSA2InputError, match=f"^layout is {layout}"):
        model(ids)


def test_a_run_whose_compilation_failed_goes_on_eagerly(tmp_path: Path) -> None:
    eager, failed = make_trainer(tmp_path), make_trainer(tmp_path, compile=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel")

    failed._forward = broken
    with pytest.raises(RuntimeError, match="no kernel"):
        failed.step()
    failed.run_eagerly()
    assert not failed.cfg.compile
    assert replace(failed.step(), seconds=0.0) == replace(eager.step(), seconds=0.0)


def test_a_batch_may_be_skipped(tmp_path: Path) -> None:
    whole, skipping = make_trainer(tmp_path), make_trainer(tmp_path)
    whole.step()
    skipping.skip_batch()
    assert (skipping.position, skipping.steps_done) == (whole.position, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_that_is_not_finite_changes_nothing(tmp_path: Path, dtype: str) -> None:
    trainer = make_trainer(tmp_path, dtype=dtype)
    trainer.step()
    for model in {trainer.model, trainer._computing}:
        nn.init.constant_(model.head.weight, math.inf)
    before = state_of(trainer)
    with pytest.raises(TrainingError, match="step 2 has loss nan"):
        trainer.step()
    assert state_of(trainer) == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def damage(name: str) -> Any:
    def flip(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return flip


def shorten(name: str) -> Any:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


def rewrite_sums(path: Path) -> None:
    names = sorted(file.name for file in path.iterdir() if file.name != "sha256sums")
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / "sha256sums").write_text("".join(sums))


def edit_json(name: str, **values: Any) -> Any:
    def edit(path: Path) -> None:
        old = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**old, **values}))
        rewrite_sums(path)

    return edit


def edit_tensors(name: str, change: Any) -> Any:
    def edit(path: Path) -> None:
        tensors = read_tensors(path / name)
        change(tensors)
        write_tensors(tensors, path / name)
        rewrite_sums(path)

    return edit


FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "config.json")
BROKEN: dict[str, tuple[Any, str]] = {
    **{f"bit of {name}": (damage(name), f"{name} is damaged") for name in FILES},
    **{f"end of {name}": (shorten(name), f"{name} is damaged") for name in FILES},
    **{f"no {name}": (lambda path, n=name: (path / n).unlink(), f"{name} cannot be read") for name in FILES},
    "no sums": (lambda path: (path / "sha256sums").unlink(), "sha256sums cannot be read"),
    "bit of sums": (damage("sha256sums"), "sha256sums"),
    "format": (edit_json("state.json", format=2), "state.json has format 2: allowed is 1"),
    "no JSON": (lambda p: ((p / "state.json").write_text("{"), rewrite_sums(p)), "state.json cannot be read"),
    "a list": (lambda p: ((p / "state.json").write_text("[]"), rewrite_sums(p)), "state.json holds a JSON list"),
    "model": (edit_json("config.json", sliding_window=9), "model with sliding_window 9; this model has 8"),
    "documents": (edit_json("state.json", data="0" * 64), "other documents"),
    "settings": (edit_json("state.json", settings={}), "batch_size is 2; .* is of a run with None"),
    "odd settings": (edit_json("state.json", settings=3), "batch_size is 2; .* is of a run with None"),
    "position": (edit_json("state.json", position={"epoch": -1, "row": 0}), "step and position"),
    "odd position": (edit_json("state.json", position=[0, 1]), "no step and position"),
    "generator": (edit_json("state.json", python_rng=[3, [1, 2], None]), "no states of generators"),
    "no tensor": (edit_tensors("model.safetensors", lambda t: t.pop("head.weight")), "head.weight is missing"),
    "more": (edit_tensors("model.safetensors", lambda t: t.update(x=torch.ones(1))), "x is not a tensor of this"),
    "shape": (
        edit_tensors("model.safetensors", lambda t: t.update({"norm.weight": torch.ones(3)})),
        r"norm.weight is torch.float32 \[3\]: allowed is torch.float32 \[64\]",
    ),
    "moments": (
        edit_tensors("optimizer.safetensors", lambda t: t.pop("head.weight.exp_avg")),
        "head.weight.exp_avg is missing",
    ),
    "torch generator": (
        edit_tensors("rng.safetensors", lambda t: t.update(cpu=torch.zeros(5, dtype=torch.uint8))),
        "no states of generators",
    ),
}


@pytest.fixture
def a_checkpoint(tmp_path: Path, finished: Path) -> Path:
    """A copy of checkpoint 4, to be broken."""
    copy = tmp_path / "checkpoint-4"
    copy.mkdir()
    for file in (finished / "checkpoint-4").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_changes_nothing(a_checkpoint: Path, tmp_path: Path, case: str) -> None:
    breaks, problem = BROKEN[case]
    trainer = make_trainer(tmp_path)
    trainer.load(a_checkpoint)
    before = state_of(trainer)
    breaks(a_checkpoint)
    with pytest.raises(CheckpointError, match=problem) as raised:
        trainer.load(a_checkpoint)
    assert str(a_checkpoint) in str(raised.value)
    assert state_of(trainer) == before


def test_a_checkpoint_of_another_run_is_refused(finished: Path, tmp_path: Path) -> None:
    path = finished / "checkpoint-4"
    wider = make_config((0, 2, 2), (1,), (1,), hidden_size=96)
    for trainer, problem in (
        (make_trainer(tmp_path, [*DOCUMENTS, b"more"]), "other documents"),
        (make_trainer(tmp_path, cfg=wider), "a model with hidden_size 64; this model has 96"),
        (make_trainer(tmp_path, dtype="bfloat16"), "dtype is 'bfloat16'; .* is of a run with 'float32'"),
        (make_trainer(tmp_path, seed=1), "seed is 1; .* is of a run with 0"),
        (make_trainer(tmp_path, lr=1e-3), r"lr is 0\.001; .* is of a run with 0\.005"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            trainer.load(path)
    with pytest.raises(CheckpointError, match="is no directory"):
        make_trainer(tmp_path).load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="sha256sums cannot be read"):
        make_trainer(tmp_path).load(finished)  # a model's directory is no checkpoint


def test_a_longer_run_may_go_on(finished: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=12, val_every=0, save_every=1)
    trainer.load(finished / "checkpoint-8")
    assert [report.step for report in run(trainer)] == [9, 10, 11, 12]


@pytest.mark.parametrize("name", ["model.safetensors", "rng.safetensors", "latest"])
def test_a_failure_while_writing_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.step()
    old = trainer.save()
    expected = state_of(trainer)
    trainer.step()

    def write(tensors: Any, path: Path) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write_tensors(tensors, path)

    def swap(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train_checkpoint, "write_tensors", write)
        if name == "latest":
            patch.setattr(train_checkpoint.os, "replace", swap)
            patch.setattr(train_checkpoint, "_write_files", lambda folder, snapshot: None)
        with pytest.raises(OSError, match="No space"):
            trainer.save()
    assert latest_checkpoint(tmp_path) == old
    assert name == "latest" or [path.name for path in tmp_path.glob("*checkpoint-*")] == [old.name]
    again = make_trainer(tmp_path)
    again.load(latest_checkpoint(tmp_path))
    assert state_of(again) == expected
    trainer.save()
    again.load(latest_checkpoint(tmp_path))
    assert state_of(again) == state_of(trainer)
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / ".checkpoint-1.abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    trainer = make_trainer(tmp_path)
    trainer.step()
    trainer.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "latest"]


def test_the_same_step_may_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.step()
    path = trainer.save()
    nn.init.ones_(trainer.model.norm.weight)
    original = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if Path(target) == path and not self.name.endswith("replaced"):
            raise OSError("no")
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        with pytest.raises(OSError, match="no"):
            trainer.save()
    assert not torch.equal(read_tensors(path / "model.safetensors")["norm.weight"], torch.ones(64))
    assert trainer.save() == path
    assert torch.equal(read_tensors(path / "model.safetensors")["norm.weight"], torch.ones(64))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "latest"]


def test_latest_names_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        latest_checkpoint(tmp_path)
    for content in (b"", b"../checkpoint-1", b"checkpoint-1/../..", b"checkpoint-x"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(CheckpointError, match="latest holds"):
            latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="latest cannot be read"):
        latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("checkpoint-12\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-12"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = CSA2ForCausalLM(CFG, dtype=dtype)
    save_model(model, tmp_path / "new" / "folder")
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    loaded = load_model(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert loaded.cfg == CFG
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    ids = torch.randint(256, (1, 20))
    assert torch.equal(loaded(ids), model(ids))


def test_a_run_leaves_a_model(finished: Path) -> None:
    final, checkpoint = load_model(finished), load_model(finished / "checkpoint-8")
    assert list(map(bits, final.state_dict().values())) == list(map(bits, checkpoint.state_dict().values()))
    other = CSA2ForCausalLM(CFG, dtype=torch.float32)
    load_attention(other, finished / "model.safetensors")  # the attention alone, into another model
    assert torch.equal(other.layers[1].attn.wkv.weight, final.layers[1].attn.wkv.weight)
    assert not torch.equal(other.embed.weight, final.embed.weight)


def test_models_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def refused(problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem) as raised:
            load_model(tmp_path)
        assert str(tmp_path) in str(raised.value)

    refused("has no config.json")
    save_model(CSA2ForCausalLM(CFG), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, values = read_tensors(weights), json.loads(config.read_text())
    write_tensors({k: v for k, v in tensors.items() if k != "head.weight"}, weights)
    refused("model.safetensors: head.weight is missing")
    write_tensors({}, weights)
    refused("holds no floating embed.weight")
    weights.write_bytes(b"x")
    refused("model.safetensors cannot be read")
    weights.unlink()
    refused("model.safetensors cannot be read")
    write_tensors(tensors, weights)
    config.write_text(json.dumps({**values, "intermediate_size": 96}))
    refused(r"ffn.w1.weight is torch.float32 \[64, 64\]: allowed is torch.float32 \[96, 64\]")
    config.write_text(json.dumps({**values, "head_dim": 33}))
    refused("config.json is no config: ")


def test_a_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CSA2ForCausalLM(CFG)
    save_model(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    nn.init.ones_(model.head.weight)

    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr("csa2_compiled.model_files.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_model(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    layers: list[int] = []

    def counted(block: CSA2Block, *args: Any) -> Any:
        layers.append(block.attn.layer_idx)
        return checkpoint_block(block, *args)

    monkeypatch.setattr("csa2_compiled.train.checkpoint_block", counted)
    kept, recomputed = (make_trainer(tmp_path, checkpointing=value, dtype=dtype) for value in (False, True))
    for _ in range(2):
        reports = [replace(trainer.step(), seconds=0.0) for trainer in (kept, recomputed)]
        assert reports[0] == reports[1]
    assert layers == [0, 1, 2] * 2
    assert state_of(kept) == state_of(recomputed)
    assert kept.validate() == recomputed.validate()


@pytest.mark.slow
def test_compiled_training_is_eager_training(tmp_path: Path) -> None:
    eager = make_trainer(tmp_path, steps=3)
    compiled = make_trainer(tmp_path, steps=3, compile=True, checkpointing=True)
    for _ in range(3):
        assert compiled.step().loss == pytest.approx(eager.step().loss, rel=1e-4)
    assert compiled.validate() == pytest.approx(eager.validate(), rel=1e-4)
