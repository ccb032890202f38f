"""A state between two layers in a safetensors file, to look at later or to go on from."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.config import ConfigError, CSA2Config
from csa2_compiled.rows import read_rows
from csa2_compiled.state import CSA2State, Publication
from csa2_compiled.tokens import CSA2InputError
from csa2_compiled.whole_file import whole_file

FORMAT = "csa2-state-1"
_PARTS = ("compressed_kv", "index_keys", "topk_indices", "candidates")


@dataclass(frozen=True)
class SavedState:
    """What a layer returned: its state, the config of its model, its number."""

    state: CSA2State
    cfg: CSA2Config
    layer_idx: int


def save_state(state: CSA2State, path: str | os.PathLike[str], cfg: CSA2Config, layer_idx: int) -> None:
    """Write the state that layer `layer_idx` of a model of `cfg` returned, to one safetensors file.

    Tensors are `ratio.{r}.` and the fields of `Publication`, bit for bit; packed rows of a cache are written as their
    values. The metadata has config, layer and a SHA-256 of everything. An existing file is replaced, only once all is
    written. Raises CSA2InputError, before anything is written, for a state that such a layer does not return, and
    OSError or SafetensorError if the file cannot be written.
    """
    if not isinstance(state, CSA2State):
        raise CSA2InputError(f"state is a {type(state).__name__}; it must be a CSA2State")
    if type(layer_idx) is not int or not 0 <= layer_idx < cfg.num_hidden_layers:
        raise CSA2InputError(f"layer_idx is {layer_idx!r}; it must be an integer from 0 to {cfg.num_hidden_layers - 1}")
    state = CSA2State(tuple(_unpacked(publication) for publication in state.publications))
    problem = _mismatch(state, cfg, layer_idx)
    if problem is not None:
        raise CSA2InputError(f"state {problem}")
    tensors = {
        # Copies: what layers publish may be views of a cache, and safetensors takes no shared memory.
        _name(publication.compress_ratio, part): getattr(publication, part).detach().cpu().contiguous().clone()
        for publication in state.publications
        for part in _PARTS
        if getattr(publication, part) is not None
    }
    metadata = {"format": FORMAT, "layer_idx": str(layer_idx), "config": json.dumps(cfg.to_dict())}
    metadata["sha256"] = _digest(metadata, tensors)
    with whole_file(Path(path)) as partial:
        save_file(tensors, partial, metadata=metadata)


def load_state(path: str | os.PathLike[str], device: torch.device | str | None = None) -> SavedState:
    """The state that `save_state` wrote, with its config and layer; tensors on `device` (None: the CPU), bit for bit.

    Raises CheckpointError, naming the file, for one that is missing, damaged, cut off or no saved state.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            # Copies: the tensors that safetensors gives stay the file's own memory.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; allowed is a whole file of save_state") from error
    if metadata.get("format") != FORMAT:
        came = metadata.get("format")
        raise CheckpointError(f"{path} has format {came!r} in its metadata: allowed is {FORMAT!r}, as of save_state")
    if metadata.pop("sha256", None) != _digest(metadata, tensors):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in its metadata")
    try:
        cfg, layer_idx = CSA2Config.from_json(json.loads(metadata["config"])), int(metadata["layer_idx"])
        cfg.role(layer_idx)  # refuses a layer that there is not
        state = CSA2State(tuple(_read(tensors, ratio, device) for ratio in _published_ratios(cfg, layer_idx)))
        problem = _mismatch(state, cfg, layer_idx)
    except (ConfigError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is no saved state: {error}; allowed is a file of save_state") from error
    if problem is not None:
        raise CheckpointError(f"{path}: the state {problem}")
    return SavedState(state, cfg, layer_idx)


def _unpacked(publication: Publication) -> Publication:
    compressed_kv, index_keys = read_rows(publication.compressed_kv), read_rows(publication.index_keys)
    return replace(publication, compressed_kv=compressed_kv, index_keys=index_keys)


def _name(ratio: int, part: str) -> str:
    return f"ratio.{ratio}.{part}"


def _read(tensors: dict[str, Tensor], ratio: int, device: torch.device | str | None) -> Publication:
    compressed_kv, index_keys, topk_indices = (tensors[_name(ratio, part)].to(device) for part in _PARTS[:3])
    candidates = tensors.get(_name(ratio, "candidates"))
    candidates = None if candidates is None else candidates.to(device)
    return Publication(ratio, compressed_kv, index_keys, topk_indices, candidates)


def _digest(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _published_ratios(cfg: CSA2Config, layer_idx: int) -> tuple[int, ...]:
    """The compress ratios that a state holds after a layer, the latest first."""
    ratios = [cfg.compress_ratios[i] for i in cfg.index_source_layer_ids if i <= layer_idx]
    return tuple(dict.fromkeys(reversed(ratios)))


def _mismatch(state: CSA2State, cfg: CSA2Config, layer_idx: int) -> str | None:
    """What the state has that the state after that layer has not, and what is allowed; None where it may be that."""
    found, expected = tuple(p.compress_ratio for p in state.publications), _published_ratios(cfg, layer_idx)
    if found != expected:
        return (
            f"holds compress ratios {list(found)}; after layer {layer_idx} of this config {list(expected)} is allowed"
        )
    for publication in state.publications:
        batch, positions = (*read_rows(publication.compressed_kv).shape, 0, 0)[:2]
        queries = state.publications[0].topk_indices.shape[1:2]  # one number in all of them
        has_candidates = _has_candidates(cfg, layer_idx, publication.compress_ratio)
        shapes = (
            (batch, positions, cfg.head_dim),
            (batch, positions, cfg.index_head_dim),
            (batch, *queries, min(cfg.index_topk, positions)),
            (batch, *queries, positions) if has_candidates else None,
        )
        for part, shape in zip(_PARTS, shapes, strict=True):
            value = getattr(publication, part)
            came = None if value is None else tuple(value.shape)
            if came != shape:
                name = _name(publication.compress_ratio, part)
                return f"has {name} of shape {came}; {shape} is allowed for this layer and config"
        picks = publication.topk_indices
        if picks.dtype != torch.int32 or ((picks < -1) | (picks >= positions)).any():
            name = _name(publication.compress_ratio, "topk_indices")
            return f"has {name} of {picks.dtype}; int32 from -1 to {positions - 1} is allowed"
        if publication.candidates is not None and publication.candidates.dtype != torch.bool:
            return f"has candidates of {publication.candidates.dtype}; bool is allowed"
    return None


def _has_candidates(cfg: CSA2Config, layer_idx: int, ratio: int) -> bool:
    source = cfg.candidate_source_layer_id
    return 0 <= source <= layer_idx and cfg.compress_ratios[source] == ratio
