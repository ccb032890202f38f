"""Training on the bytes of texts: one step at a time, with checkpoints that a run goes on from bit for bit."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.checkpointing import checkpoint_block
from csa2_compiled.compiled import CompiledModel, compile_model
from csa2_compiled.distillation import DistillationLosses, chunk_size_for, enable_distillation
from csa2_compiled.model import CSA2ForCausalLM, RunBlock
from csa2_compiled.model_files import WEIGHTS_NAME, check_tensors, copy_in_dtype, copy_parameters, save_model
from csa2_compiled.tokens import group_alignment
from csa2_compiled.train_checkpoint import (
    OPTIMIZER_NAME,
    RNG_NAME,
    STATE_NAME,
    Snapshot,
    read_checkpoint,
    write_checkpoint,
)
from csa2_compiled.train_data import IGNORED, Batch, Position, TrainData

BETAS, EPSILON = (0.9, 0.95), 1e-8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What a resumed run may change: the rest would make it another run.
_FREE_ON_RESUME = ("steps", "val_every", "save_every", "compile", "checkpointing")


OnStep = Callable[["StepReport"], None]


class TrainConfigError(ValueError):
    """A setting that makes no sense; `field` is its name, with which the message begins."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class TrainingError(RuntimeError):
    """A step that cannot go on; parameters are as they were before it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run. Raises TrainConfigError, naming field and what is allowed.

    steps: of the whole run. batch_size: rows of seq_len bytes. lr: peak learning rate, after `warmup` steps of linear
    growth; a cosine takes it to min_lr_ratio * lr at the last step. weight_decay: of matrices only. grad_clip: norm of
    all gradients together, the indexers' apart; 0 for no limit. val_fraction: share of windows held out. val_every,
    save_every: in steps, 0 for the end only. dtype: that the model computes in; parameters and the optimizer stay
    float32. compile: see `compile_model`. checkpointing: see `checkpoint_block`. distill: train the indexers too, by
    the loss that `DistillationLosses` adds, distill_weight times; the first distill_warmup steps in its stage "dense",
    the others in "sparse". Only every distill_every-th step, from the first on, has that loss.
    """

    steps: int
    batch_size: int = 8
    seq_len: int = 256
    lr: float = 1e-3
    warmup: int = 20
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    val_fraction: float = 0.05
    val_every: int = 100
    save_every: int = 500
    seed: int = 0
    dtype: str = "float32"
    compile: bool = False
    checkpointing: bool = False
    distill: bool = False
    distill_warmup: int = 1000
    distill_weight: float = 1.0
    distill_every: int = 1

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "seq_len": 2, "distill_every": 1}
        may_be_zero = ("warmup", "val_every", "save_every", "seed", "distill_warmup")
        for name, minimum in {**least, **dict.fromkeys(may_be_zero, 0)}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**63:
                self._refuse(name, f"an integer of at least {minimum}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "grad_clip", "val_fraction", "distill_weight"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                above = "above" if name in ("lr", "distill_weight") else "of at least"
                self._refuse(name, f"a finite number {above} 0")
            if name in ("lr", "distill_weight") and value == 0:
                self._refuse(name, "a finite number above 0")
        if self.min_lr_ratio > 1:
            self._refuse("min_lr_ratio", "a number from 0 to 1")
        if self.val_fraction >= 1:
            self._refuse("val_fraction", "a number from 0 to below 1")
        if self.dtype not in DTYPES:
            self._refuse("dtype", " or ".join(DTYPES))
        for name in ("compile", "checkpointing", "distill"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, the first being 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)

    def _refuse(self, field: str, allowed: str) -> NoReturn:
        raise TrainConfigError(field, f"it is {getattr(self, field)!r}; allowed is {allowed}")


@dataclass(frozen=True)
class StepReport:
    """One step. step: 1 for the first. loss: mean over the predicted bytes, in nats. grad_norm: of all
    gradients but the indexers', before clipping.
    num_bytes: of text, pads left out; seconds: without validation and saving. val_bits_per_byte: None without one.
    distillation_loss: of all indexers together, in nats a query, unweighted and no part of loss; None in a step without
    it."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    num_bytes: int
    seconds: float
    val_bits_per_byte: float | None = None
    distillation_loss: float | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups of the trained parameters: matrices decay; norms, sinks and all else of one dimension do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the next-byte losses in nats, float32: logits [B, S, vocab], targets int64 [B, S] of a `Batch`."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Trainer:
    """A model, its data and its optimizer between two steps.

    In bfloat16 a copy of the model computes: dense matrices and activations in bfloat16; norms, sinks and pooling in
    float32, as in every bfloat16 CSA2 model. Its gradients go to the float32 parameters, which the optimizer changes
    and the copy takes over, rounded. (torch.autocast would hand on bfloat16 keys beside float32 activations, which
    the layers refuse.)
    """

    def __init__(self, model: CSA2ForCausalLM, documents: Sequence[bytes], cfg: TrainConfig, out: Path) -> None:
        """model: with float32 parameters, on the device to train on. documents: see `TrainData`. out: the directory
        that `save` writes to. Raises TrainConfigError or TrainDataError."""
        if model.embed.weight.dtype != torch.float32:
            raise TypeError(f"model is of {model.embed.weight.dtype}; parameters are trained in torch.float32")
        longest = model.cfg.max_position_embeddings
        if cfg.seq_len > longest:
            raise TrainConfigError("seq_len", f"it is {cfg.seq_len}; the model takes up to {longest} tokens")
        if cfg.distill and not model.cfg.index_source_layer_ids:
            raise TrainConfigError("distill", "it is True; the model has no layer that selects, so it must be False")
        alignment = group_alignment(model.cfg.compress_ratios)
        self.data = TrainData(documents, cfg.seq_len, alignment, cfg.seed, cfg.val_fraction)
        self.model, self.cfg, self.out = model.train(), cfg, Path(out)
        if cfg.distill:
            enable_distillation(model)
        self.position = Position()
        self.steps_done = 0
        groups = parameter_groups(model, cfg.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=BETAS, eps=EPSILON)
        self._computing = model if cfg.dtype == "float32" else copy_in_dtype(model, DTYPES[cfg.dtype]).train()
        self._forward = self._make_forward()

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    def step(self) -> StepReport:
        """Train on the next batch. Raises TrainingError for a loss or gradient that is not finite."""
        begin = time.perf_counter()
        lr = self.cfg.learning_rate(self.steps_done)
        batch, after = self.data.batch(self.position, self.cfg.batch_size)
        loss, distillation_loss = self._backward(batch.to(self.device))
        norm, indexer_norm = self._clip_gradients()
        if not all(map(math.isfinite, (loss, distillation_loss or 0.0, norm, indexer_norm))):
            self.optimizer.zero_grad()
            problem = f"has loss {loss} and a gradient of norm {norm}"
            if distillation_loss is not None:
                problem += f", distillation loss {distillation_loss} and a gradient of norm {indexer_norm}"
            raise TrainingError(f"step {self.steps_done + 1} {problem}")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._take_over_parameters()
        epoch, self.position = self.position.epoch, after
        self.steps_done += 1
        seconds = time.perf_counter() - begin
        figures = (self.steps_done, epoch, loss, lr, norm, batch.num_bytes, seconds)
        return StepReport(*figures, distillation_loss=distillation_loss)

    def run_eagerly(self) -> None:
        """Go on without compiling, for instance after a step whose compilation failed; what gradients it left go."""
        self.cfg = replace(self.cfg, compile=False)
        self.model.zero_grad()
        self._computing.zero_grad()
        self._forward = self._make_forward()

    def skip_batch(self) -> None:
        """Leave the next batch out."""
        _, self.position = self.data.batch(self.position, self.cfg.batch_size)

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean next-byte loss on the held-out windows, in bits; None when there are none."""
        if not self.data.val_windows:
            return None
        nats, count = 0.0, 0
        for batch in self.data.validation_batches(self.cfg.batch_size):
            on_device = batch.to(self.device)
            logits = self._forward(on_device.input_ids, document_ids=on_device.document_ids)
            nats += summed_loss(logits, on_device.targets).item()
            count += int((batch.targets != IGNORED).sum())
        return nats / count / math.log(2)

    def save(self) -> Path:
        """Write checkpoint-{steps_done} into `out` (see `write_checkpoint`) and return its directory."""
        return write_checkpoint(self.out, self._snapshot())

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of this model, these documents and these settings.

        steps, val_every, save_every, compile and checkpointing may differ; another number of steps changes the
        learning rates that follow. Raises CheckpointError, having changed nothing, for anything else.
        """
        snapshot = read_checkpoint(path)
        self._check_settings(snapshot, path)
        check_tensors(snapshot.model, self.model.state_dict(), path / WEIGHTS_NAME)
        optimizer = self._check_optimizer(snapshot.optimizer, path / OPTIMIZER_NAME)
        step, position = _progress(snapshot.state, path / STATE_NAME)
        restore_rng = self._check_rng(snapshot, path)
        self.model.load_state_dict(snapshot.model)
        self._take_over_parameters()
        self.optimizer.load_state_dict(optimizer)
        self.steps_done, self.position = step, position
        restore_rng()

    def _make_forward(self) -> Callable[..., Tensor]:
        run_block = checkpoint_block if self.cfg.checkpointing else None
        if self.cfg.compile:
            return compile_model(self._computing, regional=True, dynamic=False, run_block=run_block)
        return partial(self._computing, run_block=run_block)

    def _distillation(self) -> DistillationLosses | None:
        """What collects the next step's distillation losses, around the blocks as `_forward` runs them."""
        cfg = self.cfg
        if not cfg.distill or self.steps_done % cfg.distill_every != 0:
            return None
        inner: RunBlock | None = checkpoint_block if cfg.checkpointing else None
        if isinstance(self._forward, CompiledModel):
            inner = self._forward.run_block
        chunk_size = chunk_size_for(self.model.cfg, cfg.batch_size, cfg.seq_len)
        return DistillationLosses("dense" if self.steps_done < cfg.distill_warmup else "sparse", chunk_size, inner)

    def _backward(self, batch: Batch) -> tuple[float, float | None]:
        """Leave the gradients in the float32 parameters; returns the mean loss and the distillation loss."""
        targets = batch.targets
        count = max(1, int((targets != IGNORED).sum()))
        distillation = self._distillation()
        if distillation is None:
            logits = self._forward(batch.input_ids, document_ids=batch.document_ids)
        else:
            run_block = distillation.run_block
            logits = self._computing(batch.input_ids, document_ids=batch.document_ids, run_block=run_block)
        loss = summed_loss(logits, targets) / count
        distilled = None if distillation is None else distillation.total()
        (loss if distilled is None else loss + self.cfg.distill_weight * distilled).backward()
        if self._computing is not self.model:
            for parameter, computed in zip(self.model.parameters(), self._computing.parameters(), strict=True):
                if computed.grad is not None:
                    parameter.grad, computed.grad = computed.grad.to(parameter.dtype), None
        return loss.item(), None if distilled is None else distilled.item()

    def _clip_gradients(self) -> tuple[float, float]:
        """Clip the indexers' gradients and all others apart, so that neither loss shortens the other's steps.

        Returns the norms before, the others' first.
        """
        trained = self._trained()
        indexers = [parameter for name, parameter in trained.items() if ".indexer." in name]
        others = [parameter for name, parameter in trained.items() if ".indexer." not in name]
        limit = self.cfg.grad_clip or math.inf
        norm, indexer_norm = (nn.utils.clip_grad_norm_(parameters, limit) for parameters in (others, indexers))
        return norm.item(), indexer_norm.item()

    def _take_over_parameters(self) -> None:
        if self._computing is not self.model:
            copy_parameters(self.model, self._computing)

    def _trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in the optimizer's order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[p]: p for group in self.optimizer.param_groups for p in group["params"]}

    def _snapshot(self) -> Snapshot:
        state = self.optimizer.state
        tensors = {f"{n}.{key}": value for n, p in self._trained().items() for key, value in state[p].items()}
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        version, numbers, gauss = random.getstate()
        progress = {"step": self.steps_done, "position": asdict(self.position)}
        origin = {"settings": asdict(self.cfg), "data": self.data.fingerprint, "torch": torch.__version__}
        values = {**progress, **origin, "python_rng": [version, list(numbers), gauss]}
        return Snapshot(self.model.cfg.to_dict(), self.model.state_dict(), tensors, rng, values)

    def _check_settings(self, snapshot: Snapshot, path: Path) -> None:
        state, own = snapshot.state, self.model.cfg.to_dict()
        for name, allowed in own.items():
            came = snapshot.config.get(name)
            if came != allowed:
                raise CheckpointError(f"{path} is of a model with {name} {came!r}; this model has {allowed!r}")
        if state.get("data") != self.data.fingerprint:
            raise CheckpointError(f"{path} is of a run on other documents: allowed are the same texts and separator")
        settings = state.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        for field in fields(TrainConfig):
            came, allowed = settings.get(field.name), getattr(self.cfg, field.name)
            if field.name not in _FREE_ON_RESUME and came != allowed:
                raise CheckpointError(f"{field.name} is {allowed!r}; {path} is of a run with {came!r}")

    def _check_optimizer(self, tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
        """The optimizer's state_dict that these tensors make. A parameter without a gradient so far has none."""
        trained = self._trained()
        expected: dict[str, Tensor] = {}
        for name, parameter in trained.items():
            if f"{name}.step" in tensors:
                step = torch.zeros((), dtype=torch.get_default_dtype())
                expected |= {f"{name}.step": step, f"{name}.exp_avg": parameter, f"{name}.exp_avg_sq": parameter}
        check_tensors(tensors, expected, path)
        state = {
            index: {key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for index, name in enumerate(trained)
            if f"{name}.step" in tensors
        }
        return {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def _check_rng(self, snapshot: Snapshot, path: Path) -> Callable[[], None]:
        """What sets the generators to the snapshot's states, which have been tried."""
        rng, trial = snapshot.rng, random.Random()
        try:
            version, numbers, gauss = snapshot.state["python_rng"]
            python = (version, tuple(numbers), gauss)
            trial.setstate(python)
            torch.Generator().set_state(rng["cpu"])
            if self.device.type == "cuda" and "cuda" in rng:
                torch.Generator(self.device).set_state(rng["cuda"])
        except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{path / RNG_NAME} or {STATE_NAME} holds no states of generators") from error

        def restore() -> None:
            random.setstate(python)
            torch.set_rng_state(rng["cpu"])
            if self.device.type == "cuda" and "cuda" in rng:
                torch.cuda.set_rng_state(rng["cuda"], self.device)

        return restore


def train(
    trainer: Trainer,
    on_step: OnStep | None = None,
    on_save: Callable[[Path], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run the steps that remain, with validations and checkpoints in between and at the end.

    on_step: called after each step, before it is saved. on_save: called with each new checkpoint. stop: asked after
    each step; true saves and ends. Returns whether all steps are done; then `out` also has the model (`save_model`).
    """
    cfg = trainer.cfg
    while trainer.steps_done < cfg.steps:
        report = trainer.step()
        last = report.step == cfg.steps
        if last or _due(report.step, cfg.val_every):
            report = replace(report, val_bits_per_byte=trainer.validate())
        if on_step is not None:
            on_step(report)
        stopping = stop()
        if last or stopping or _due(report.step, cfg.save_every):
            path = trainer.save()
            if on_save is not None:
                on_save(path)
        if stopping and not last:
            return False
    save_model(trainer.model, trainer.out)
    return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _progress(state: dict[str, Any], path: Path) -> tuple[int, Position]:
    try:
        step, position = state["step"], Position(**state["position"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no step and position: allowed is the state of a run") from error
    numbers = (step, position.epoch, position.row)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise CheckpointError(f"{path} has step and position {numbers}: allowed are integers of at least 0")
    return step, position
