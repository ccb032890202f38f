"""Checkpoint directories of a training run: written whole or not at all, read only if nothing in them changed."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.model_files import CONFIG_NAME, WEIGHTS_NAME, read_tensors, write_tensors

FORMAT = 1
LATEST_NAME = "latest"
OPTIMIZER_NAME, RNG_NAME, STATE_NAME = "optimizer.safetensors", "rng.safetensors", "state.json"
_SUMS_NAME = "sha256sums"  # as `sha256sum -c` reads it
_FILES = (WEIGHTS_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME, CONFIG_NAME)
_NAME = re.compile(r"checkpoint-[0-9]+")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run goes on from.

    model: every parameter; optimizer: its tensors, by parameter and name; rng: states of torch's generators, uint8;
    state: JSON values, "step" among them.
    """

    config: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]


def write_checkpoint(out: Path, snapshot: Snapshot) -> Path:
    """Write `out`/checkpoint-{step}, then point `out`/latest to it; both appear whole.

    A failure leaves what was there. Leftovers of earlier failures are removed. Raises OSError or SafetensorError.
    """
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = out / f"checkpoint-{snapshot.state['step']}"
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=out))
    try:
        partial.chmod(0o777 & ~_umask())
        _write_files(partial, snapshot)
        _rename_over(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    latest = out / f".{LATEST_NAME}.partial"
    latest.write_text(f"{target.name}\n", encoding="utf-8")
    _sync([latest])
    os.replace(latest, out / LATEST_NAME)
    _sync([out])
    return target


def latest_checkpoint(out: Path) -> Path:
    """The checkpoint that `out`/latest names. Raises CheckpointError."""
    latest = out / LATEST_NAME
    try:
        name = latest.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{latest} cannot be read: there is no checkpoint to go on from") from error
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{latest} holds {name[:40]!r}: allowed is the name of a checkpoint, as checkpoint-100")
    return out / name


def read_checkpoint(path: Path) -> Snapshot:
    """Read a checkpoint whose files are all as they were written. Raises CheckpointError, naming the file."""
    _check_sums(path)
    config, state = (_read_object(path / name) for name in (CONFIG_NAME, STATE_NAME))
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE_NAME} has format {state.get('format')!r}: allowed is {FORMAT}")
    model, optimizer, rng = (read_tensors(path / name) for name in (WEIGHTS_NAME, OPTIMIZER_NAME, RNG_NAME))
    return Snapshot(config, model, optimizer, rng, state)


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    write_tensors(snapshot.model, folder / WEIGHTS_NAME)
    write_tensors(snapshot.optimizer, folder / OPTIMIZER_NAME)
    write_tensors(snapshot.rng, folder / RNG_NAME)
    for name, values in ((CONFIG_NAME, snapshot.config), (STATE_NAME, {"format": FORMAT, **snapshot.state})):
        (folder / name).write_text(json.dumps(values) + "\n", encoding="utf-8")
    sums = "".join(f"{_sha256(folder / name)}  {name}\n" for name in _FILES)
    (folder / _SUMS_NAME).write_text(sums, encoding="utf-8")
    _sync([*(folder / name for name in (*_FILES, _SUMS_NAME)), folder])


def _rename_over(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # Of an earlier run past this step: someone set `latest` back, or it ended before it was written.
    aside = partial.with_name(f"{partial.name}.replaced")
    target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _check_sums(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory: allowed is a checkpoint of `csa2 train`")
    try:
        lines = (path / _SUMS_NAME).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _SUMS_NAME} cannot be read: allowed is a checkpoint of `csa2 train`") from error
    for name in _FILES:
        try:
            digest = _sha256(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if digest != sums.get(name):
            raise CheckpointError(f"{path / name} is damaged: its SHA-256 is not the one in {_SUMS_NAME}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}: allowed is an object")
    return values


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(paths: Iterable[Path]) -> None:
    """Have the system write files and directories to the disk, where it can."""
    for path in paths:
        with suppress(OSError):  # directories cannot be opened everywhere
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
