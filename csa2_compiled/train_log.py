"""The log of a training run: a JSON object a step, one a line."""

import json
from pathlib import Path
from typing import Any

from csa2_compiled.train import StepReport
from csa2_compiled.whole_file import whole_file


class TrainLog:
    """Appends steps to a file, each flushed: a checkpoint never has a step that the log misses.

    Keys: step, epoch, loss (nats a byte), lr, grad_norm, bytes, seconds, bytes_per_second; distillation_loss (nats a
    query) of a run that distills; val_bits_per_byte where there was a validation.
    """

    def __init__(self, path: Path, steps_done: int) -> None:
        """Keep what an earlier run logged up to `steps_done`; what it did after its checkpoint is done again."""
        self.path = path
        kept = [line for line in _lines(path) if _step(line) <= steps_done]
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, report: StepReport) -> None:
        """Append one step. Raises OSError."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_record(report)) + "\n")


def _record(report: StepReport) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": report.step,
        "epoch": report.epoch,
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "bytes": report.num_bytes,
        "seconds": round(report.seconds, 6),
        "bytes_per_second": round(report.bytes_per_second, 1),
    }
    if report.distillation_loss is not None:
        values["distillation_loss"] = report.distillation_loss
    if report.val_bits_per_byte is not None:
        values["val_bits_per_byte"] = report.val_bits_per_byte
    return values


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; infinite for one that was not written whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return float("inf")
