"""A whole model in a directory: model.safetensors with every parameter, config.json beside it."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.config import ConfigError, CSA2Config
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.whole_file import whole_file

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
DEMO_FOLDER = Path(__file__).parent / "assets"


def save_model(model: CSA2ForCausalLM, path: str | os.PathLike[str]) -> None:
    """Write every parameter and the config of a model to a directory, which is made if it is not there.

    path: gets model.safetensors (keys and dtypes of ``model.state_dict()``, which `load_attention` reads too) and
    config.json. Each file replaces an older one only once it is whole. Raises OSError or SafetensorError.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(model.state_dict(), folder / WEIGHTS_NAME)
    with whole_file(folder / CONFIG_NAME) as partial:
        model.cfg.to_json(partial)


def load_model(path: str | os.PathLike[str], device: torch.device | str | None = None) -> CSA2ForCausalLM:
    """The model that `save_model` wrote to a directory, in the dtype of its embedding.

    Parameters come bit for bit; norms, sinks and the pooling of groups are float32 in every model. Raises
    CheckpointError, naming file and tensor, for files that are missing, damaged or of another model.
    """
    folder = Path(path)
    try:
        cfg = CSA2Config.from_json(folder / CONFIG_NAME)
    except FileNotFoundError as error:
        message = f"{folder} has no {CONFIG_NAME}: allowed is a directory with {WEIGHTS_NAME} and {CONFIG_NAME}"
        raise CheckpointError(message) from error
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_NAME} is no config: {error}") from error
    tensors = read_tensors(folder / WEIGHTS_NAME)
    embedding = tensors.get("embed.weight")
    if embedding is None or not embedding.is_floating_point():
        raise CheckpointError(f"{folder / WEIGHTS_NAME} holds no floating embed.weight: allowed is a whole model's")
    with torch.random.fork_rng(devices=[]):  # the drawn weights are replaced: the caller's numbers stay
        model = CSA2ForCausalLM(cfg, dtype=embedding.dtype)
    parameters = model.state_dict(keep_vars=True)
    check_tensors(tensors, parameters, folder / WEIGHTS_NAME)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model.to(device)


def load_demo_model(device: torch.device | str | None = None) -> CSA2ForCausalLM:
    """The small model that comes with this package, ready to generate: bytes of Python's documentation, bfloat16.

    Its card is README.md in `DEMO_FOLDER`. Raises CheckpointError where the package was installed without its files.
    """
    return load_model(demo_folder(), device).eval()


def demo_folder() -> Path:
    """The directory of the small model. Raises CheckpointError when its files are not there."""
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        if not (DEMO_FOLDER / name).is_file():
            raise CheckpointError(
                f"{DEMO_FOLDER} has no {name}: the small model that comes with csa2-compiled is not installed; "
                "benchmarks/train_demo.py makes it, and any other model can be given instead"
            )
    return DEMO_FOLDER


def copy_in_dtype(model: CSA2ForCausalLM, dtype: torch.dtype) -> CSA2ForCausalLM:
    """A copy whose activations and dense matrices are of `dtype`, on the same device, for the same gradients."""
    with torch.random.fork_rng(devices=[]):
        copy = CSA2ForCausalLM(model.cfg, dtype=dtype).to(model.embed.weight.device)
    for source, target in zip(model.layers, copy.layers, strict=True):
        target.attn.layout = source.attn.layout
    for original, copied in zip(model.parameters(), copy.parameters(), strict=True):
        copied.requires_grad_(original.requires_grad)
    copy_parameters(model, copy)
    return copy


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters into a module of the same structure, rounded to the target's dtypes."""
    for original, copied in zip(source.parameters(), target.parameters(), strict=True):
        copied.copy_(original)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; an older one is replaced only once the new one is whole."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        save_file(whole, partial, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies: the tensors that safetensors gives stay the file's own memory.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; allowed is a whole safetensors file") from error


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError unless both have the same names, shapes and dtypes; the message names `path`."""
    unlike = sorted(tensors.keys() ^ expected.keys())
    if unlike:
        problem = "is missing" if unlike[0] in expected else "is not a tensor of this model"
        raise CheckpointError(f"{path}: {unlike[0]} {problem}: allowed are exactly the model's {len(expected)} tensors")
    for name, tensor in tensors.items():
        came, allowed = (f"{t.dtype} {list(t.shape)}" for t in (tensor, expected[name]))
        if came != allowed:
            raise CheckpointError(f"{path}: {name} is {came}: allowed is {allowed}")
