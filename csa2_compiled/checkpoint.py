"""Attention weights from and to safetensors, in the released checkpoint's names and quantization."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from csa2_compiled.whole_file import whole_file

SCALE_BLOCK = 32  # the released E4M3 matrices carry one scale per 32x32 block
INDEX_NAME = "model.safetensors.index.json"

_LAYER_KEY = re.compile(r"(?:model\.)?layers\.([0-9]+)\.attn\.(.+)")
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' spelling
_SCALE_DTYPES = ("F8_E8M0", "F32")


class CheckpointError(ValueError):
    """A checkpoint that cannot fill the module; the message says where, what came, what is allowed."""


def load_attention(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill the attention parameters of a layer or a model from a checkpoint; all of them or, on error, none.

    module: one attention layer (it has an int `layer_idx`), or a model whose `layers` each have such a layer
    as `attn`. path: a safetensors file, or a directory of them, of which model.safetensors.index.json, if
    there, says which file holds which key. Keys are the names in the layer's state_dict() after
    `layers.{layer_idx}.attn.` or `model.layers.{layer_idx}.attn.`; a file with one layer may have them bare.
    Keys of anything else are ignored, and only what is needed is read. Host memory holds one more copy of the
    parameters meanwhile.

    A floating tensor is converted to its parameter's dtype. A 2-D E4M3 tensor `X.weight` [O, I] is first
    dequantized in fp32 with `X.scale` [ceil(O/32), ceil(I/32)] (E8M0 or fp32), one scale per 32x32 block.

    Raises CheckpointError, before the module has changed, for a file that cannot be read, a missing,
    ambiguous or unknown key of a layer, a wrong shape or dtype, a parameter on the meta device, and TypeError
    for a module that is neither.
    """
    layers = _attention_layers(module)
    bare_allowed = hasattr(module, "layer_idx")
    checkpoint = _Checkpoint(Path(path))
    found = []
    for layer in layers:
        parameters = layer.state_dict(keep_vars=True)
        entries = _layer_entries(checkpoint, layer.layer_idx, parameters, bare_allowed)
        # Shapes and dtypes stand in the files' headers: refuse before the first large read.
        _check_layer(checkpoint, layer.layer_idx, parameters, entries)
        found.append((parameters, entries))
    staged = [
        (parameter, _read_floating(checkpoint, entries, name).to(parameter.dtype))
        for parameters, entries in found
        for name, parameter in parameters.items()
    ]
    with torch.no_grad():
        for parameter, value in staged:
            parameter.copy_(value)


def save_attention(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the attention parameters of a layer or a model to one safetensors file, unquantized.

    module: as for load_attention. Keys are `layers.{layer_idx}.attn.` and the name in the layer's
    state_dict(), dtypes those of the parameters. An existing file is replaced, only once all is written.
    Raises TypeError for a module that is neither, OSError or SafetensorError if the file cannot be written.
    """
    tensors = {
        f"layers.{layer.layer_idx}.attn.{name}": tensor.detach().cpu().contiguous()
        for layer in _attention_layers(module)
        for name, tensor in layer.state_dict().items()
    }
    with whole_file(Path(path)) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})


class _Entry(NamedTuple):
    key: str
    file: Path

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


class _Checkpoint:
    """The keys of a checkpoint and the files that hold them; files are opened when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers: dict[Path, Any] = {}
        index = path / INDEX_NAME
        if not path.is_dir():
            self.entries = self._entries_in([path])
        elif index.exists():
            self.entries = _read_index(index)
        else:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{path} holds no file: allowed is a directory with *.safetensors")
            self.entries = self._entries_in(files)

    def header(self, entry: _Entry) -> tuple[str, tuple[int, ...]]:
        """Dtype (safetensors' spelling) and shape of a tensor, without reading it."""
        try:
            part = self._reader(entry.file).get_slice(entry.key)
            return part.get_dtype(), tuple(part.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{entry} cannot be read: {error}") from error

    def tensor(self, entry: _Entry) -> Tensor:
        try:
            return self._reader(entry.file).get_tensor(entry.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry} cannot be read: {error}") from error

    def _entries_in(self, files: Iterable[Path]) -> list[_Entry]:
        return [_Entry(key, file) for file in files for key in self._reader(file).keys()]  # noqa: SIM118

    def _reader(self, file: Path) -> Any:
        if file not in self._readers:
            try:
                self._readers[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                message = f"{file} cannot be read: {error}; allowed is a whole safetensors file"
                raise CheckpointError(message) from error
        return self._readers[file]


def _read_index(index: Path) -> list[_Entry]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = [_Entry(key, index.parent / file) for key, file in weight_map.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        allowed = '{"weight_map": {key: file name}}'
        raise CheckpointError(f"{index} is no index ({error!r}): allowed is {allowed}") from error
    for key, file in entries:
        if file.parent != index.parent or file.name == "..":
            raise CheckpointError(f"{index}: {key} is in {file}: allowed is a file beside the index")
    return entries


def _attention_layers(module: nn.Module) -> list[Any]:
    """The attention layers of a module, itself or its layers' `attn`; Any, for they have a layer_idx."""
    layers = getattr(module, "layers", None)
    attentions = [module]
    if isinstance(layers, nn.ModuleList):
        attentions = [getattr(layer, "attn", layer) for layer in layers]
    # What torch.compile wraps has the wrapper's prefix on its names.
    attentions = [getattr(attention, "_orig_mod", attention) for attention in attentions]
    for attention in attentions:
        if not isinstance(getattr(attention, "layer_idx", None), int):
            raise TypeError(
                f"{type(attention).__name__} has no int layer_idx: allowed is an attention layer, or a model "
                f"with a ModuleList `layers` whose items have an attention layer `attn`"
            )
    return attentions


def _layer_entries(
    checkpoint: _Checkpoint, layer_idx: int, parameters: dict[str, Tensor], bare_allowed: bool
) -> dict[str, _Entry]:
    """Where the tensors of one layer are, by their names without prefix."""
    entries: dict[str, _Entry] = {}
    bare = bare_allowed and any(entry.key in parameters for entry in checkpoint.entries)
    for entry in checkpoint.entries:
        match = _LAYER_KEY.fullmatch(entry.key)
        if match is not None and match[1] == str(layer_idx):
            name = match[2]
        elif bare and match is None:
            name = entry.key
        else:
            continue
        if name in entries:
            raise CheckpointError(f"{entry} came besides {entries[name]}: allowed is one tensor for it")
        entries[name] = entry
    return entries


def _check_layer(
    checkpoint: _Checkpoint, layer_idx: int, parameters: dict[str, Tensor], entries: dict[str, _Entry]
) -> None:
    missing = [name for name in parameters if name not in entries]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: keys of layer {layer_idx} are missing: {', '.join(missing)}; allowed is a "
            f"checkpoint with all its parameters, as layers.{layer_idx}.attn.{missing[0]} and so on"
        )
    scales = set()
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise CheckpointError(
                f"{name} of layer {layer_idx} is on the meta device: allowed is memory to load into, as from "
                f"module.to_empty(device=...)"
            )
        if _check_tensor(checkpoint, parameter, name, entries):
            scales.add(_scale_name(name))
    for name, entry in entries.items():
        if name not in parameters and name not in scales:
            known = ", ".join(parameters)
            raise CheckpointError(
                f"{entry} is unknown to layer {layer_idx}: allowed are {known}, and a scale of an E4M3 matrix"
            )


def _check_tensor(checkpoint: _Checkpoint, parameter: Tensor, name: str, entries: dict[str, _Entry]) -> bool:
    """Whether the tensor is quantized, after checks of its header and its scale's."""
    entry = entries[name]
    dtype, shape = checkpoint.header(entry)
    if shape != tuple(parameter.shape):
        raise CheckpointError(f"{entry} has shape {list(shape)}: allowed is {list(parameter.shape)}")
    if dtype in _PLAIN_DTYPES:
        return False
    if dtype != "F8_E4M3" or len(shape) != 2 or not name.endswith(".weight"):
        plain = ", ".join(_PLAIN_DTYPES)
        raise CheckpointError(
            f"{entry} has dtype {dtype}, shape {list(shape)}: allowed is {plain}, or F8_E4M3 for a matrix with a scale"
        )
    scale = entries.get(_scale_name(name))
    blocks = tuple(-(-size // SCALE_BLOCK) for size in shape)
    allowed = f"{' or '.join(_SCALE_DTYPES)} of shape {list(blocks)}, one per 32x32 block"
    if scale is None:
        raise CheckpointError(f"{entry} is E4M3 and {_scale_name(entry.key)} is missing: allowed is {allowed}")
    scale_dtype, scale_shape = checkpoint.header(scale)
    if scale_dtype not in _SCALE_DTYPES or scale_shape != blocks:
        came = f"{scale_dtype} of shape {list(scale_shape)}"
        raise CheckpointError(f"{scale} is {came}: allowed is {allowed}")
    return True


def _read_floating(checkpoint: _Checkpoint, entries: dict[str, _Entry], name: str) -> Tensor:
    value = checkpoint.tensor(entries[name])
    if value.dtype != torch.float8_e4m3fn:
        return value
    entry = entries[_scale_name(name)]
    scale = checkpoint.tensor(entry).float()
    if not scale.isfinite().all():
        raise CheckpointError(f"{entry} holds a scale that is NaN or infinite: allowed are finite scales")
    rows, columns = value.shape
    scale = scale.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return value.float() * scale


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"
