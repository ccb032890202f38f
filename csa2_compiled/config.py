"""The shape of a CSA2 model: which layer compresses, which selects, which only reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

# The groups of the fp8 and mxfp4 quantization boundaries: a channel count must be whole groups.
QUANTIZATION_GROUP = 32

# inference/config.json's names for the fields that it names otherwise than config.json.
_INFERENCE_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "intermediate_size": "inter_dim",
}
_INFERENCE_YARN_NAMES = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}


class ConfigError(ValueError):
    """A config value, or a question to a config, that makes no sense; the message says what is allowed."""


class LayerRole(str, Enum):
    """What a layer does besides its sliding window.

    WINDOW: nothing, it shares nothing. FULL: compresses its own KV, makes index keys, selects, and publishes
    all three. REINDEX: makes a new selection among published KV. REUSE: reads published KV and selection.
    """

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's change of the rotary frequencies (frequencies only: no attention temperature).

    factor: >= 1, by how much the slow frequencies are divided. beta_fast >= beta_slow > 0: turns within the
    original length, above and below which a frequency is left alone or divided in full.
    original_max_position_embeddings: the length in tokens of the original training. Raises ConfigError.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            object.__setattr__(self, name, _positive_float(f"rope_scaling.{name}", getattr(self, name)))
        length = self.original_max_position_embeddings
        _check_int("rope_scaling.original_max_position_embeddings", length, minimum=1)
        if self.factor < 1:
            _refuse("rope_scaling.factor", self.factor, "a number >= 1")
        if self.beta_fast < self.beta_slow:
            _refuse("rope_scaling.beta_fast", self.beta_fast, f"a number >= beta_slow = {self.beta_slow}")


@dataclass(frozen=True)
class RotaryParameters:
    """What fixes a layer's rotary frequencies: the base (theta) and YaRN's scaling, None for none."""

    base: float
    yarn: YarnScaling | None


@dataclass(frozen=True, kw_only=True)
class CSA2Config:
    """Shapes and layer schedule of a CSA2 model; immutable and hashable.

    The field names are those of the released config.json's text_config. Lists become tuples, numbers of the
    float fields become floats. Raises ConfigError, naming field, value and what is allowed, for any value
    that does not fit the others.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int  # the last channels of head_dim and index_head_dim rotate
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # per output group
    sliding_window: int  # tokens, the query's own included
    compress_ratios: tuple[int, ...]  # tokens per compressed position of each layer, 0: window only
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # compressed positions that a query selects
    candidate_source_layer_id: int = -1  # -1: no layer narrows the selection of later ones
    candidate_topk_blocks: int = 0  # ignored without a candidate source, as is the next
    candidate_block_size: int = 0  # compressed positions
    rope_theta: float  # window layers
    compress_rope_theta: float  # layers with compressed KV
    rope_scaling: YarnScaling | None = None  # of compress_rope_theta only
    rms_norm_eps: float
    max_position_embeddings: int = 1048576
    vocab_size: int = 256  # bytes
    # The width of the host model's SwiGLU; None is replaced by 8/3 hidden_size, up to a multiple of 32.
    intermediate_size: int = None  # type: ignore[assignment]
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        self._check_widths()
        self._check_sources()
        self._check_candidates()

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> CSA2Config:
        """Read a config.json (text fields nested under `text_config`, or flat) or an inference/config.json.

        source: path of the JSON file, or the parsed object. Keys that are no field are ignored. Raises
        FileNotFoundError for a missing file and ConfigError for anything else that cannot be read, a missing
        key or a bad value.
        """
        values = source if isinstance(source, Mapping) else _read_json(Path(source))
        if "text_config" in values:
            values = values["text_config"]
            if not isinstance(values, Mapping):
                _refuse("text_config", values, "an object with the text model's fields")
        inference = "hidden_size" not in values and ("dim" in values or "n_layers" in values)
        names = _INFERENCE_NAMES if inference else {}
        arguments: dict[str, Any] = {}
        for field in fields(cls):
            name = names.get(field.name, field.name)
            if name in values:
                arguments[field.name] = values[name]
            elif field.default is MISSING:
                layout = "inference/config.json" if inference else "config.json (or of its text_config)"
                raise ConfigError(f"{name} is missing: it is a required key of {layout}")
        if inference:
            arguments["rope_scaling"] = _inference_yarn(values)
        return cls(**arguments)

    @classmethod
    def v41_flash(cls) -> CSA2Config:
        """The released DeepSeek-V4.1-Flash attention: 40 layers, 64 heads of 512 channels."""
        return cls(
            hidden_size=5120,
            num_hidden_layers=40,
            num_attention_heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1280,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
            kv_source_layer_ids=(2, 8, 14, 20),
            index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            index_n_heads=32,
            index_head_dim=128,
            index_topk=512,
            candidate_source_layer_id=20,
            candidate_topk_blocks=2048,
            candidate_block_size=8,
            rope_theta=10000.0,
            compress_rope_theta=160000.0,
            rope_scaling=YarnScaling(
                factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
            ),
            rms_norm_eps=1e-20,
            max_position_embeddings=1048576,
            vocab_size=129280,
        )

    @classmethod
    def tiny(cls) -> CSA2Config:
        """A byte-level model of 9 narrow layers in which every role occurs, ratios 0, 2 and 1."""
        return cls(
            hidden_size=128,
            num_hidden_layers=9,
            num_attention_heads=4,
            head_dim=64,
            qk_rope_head_dim=32,
            q_lora_rank=64,
            o_groups=2,
            o_lora_rank=32,
            sliding_window=64,
            compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1),
            kv_source_layer_ids=(2, 5),
            index_source_layer_ids=(2, 5, 7),
            index_n_heads=4,
            index_head_dim=64,
            index_topk=32,
            candidate_source_layer_id=5,
            candidate_topk_blocks=16,
            candidate_block_size=4,
            rope_theta=10000.0,
            compress_rope_theta=160000.0,
            rms_norm_eps=1e-20,
            max_position_embeddings=16384,
            intermediate_size=256,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values (lists, not tuples) under config.json's names; from_json reads it."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        if self.rope_scaling is not None:
            values["rope_scaling"] = {"rope_type": "yarn", **vars(self.rope_scaling)}
        return values

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write to_dict() to a JSON file, which from_json reads back equal. Raises OSError."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @property
    def layer_roles(self) -> tuple[LayerRole, ...]:
        """The role of each layer, in order."""
        return tuple(self.role(layer) for layer in range(self.num_hidden_layers))

    def role(self, layer: int) -> LayerRole:
        """The role of one layer. Raises ConfigError for a layer that the model does not have."""
        if self._ratio(layer) == 0:
            return LayerRole.WINDOW
        if layer in self.kv_source_layer_ids:
            return LayerRole.FULL
        return LayerRole.REINDEX if layer in self.index_source_layer_ids else LayerRole.REUSE

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed KV and index keys `layer` reads: itself or the nearest before it of its
        ratio. Raises ConfigError for a window layer."""
        return self._nearest("kv_source_layer_ids", layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` reads: itself or the nearest before it of its ratio. Raises
        ConfigError for a window layer."""
        return self._nearest("index_source_layer_ids", layer)

    def publishes_candidates(self, layer: int) -> bool:
        """Whether `layer` publishes the candidate mask that later index sources select within."""
        self._ratio(layer)
        return layer == self.candidate_source_layer_id

    def selects_within_candidates(self, layer: int) -> bool:
        """Whether `layer` makes a selection, and makes it inside the candidates of an earlier layer."""
        self._ratio(layer)
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id >= 0

    def rotary_parameters(self, layer: int) -> RotaryParameters:
        """The rotary embedding of one layer; only layers with compressed KV use YaRN and their own base."""
        if self._ratio(layer) == 0:
            return RotaryParameters(self.rope_theta, None)
        return RotaryParameters(self.compress_rope_theta, self.rope_scaling)

    def _ratio(self, layer: int) -> int:
        if not _is_int(layer) or not 0 <= layer < self.num_hidden_layers:
            _refuse("layer", layer, f"an integer from 0 to {self.num_hidden_layers - 1}")
        return self.compress_ratios[layer]

    def _nearest(self, field: str, layer: int) -> int:
        ratio = self._ratio(layer)
        if ratio == 0:
            raise ConfigError(f"layer {layer} has compress ratio 0, window only: it reads from no source")
        sources = [i for i in getattr(self, field) if i <= layer and self.compress_ratios[i] == ratio]
        if not sources:
            allowed = f"one source of ratio {ratio} at or before layer {layer}, which has that ratio"
            _refuse(field, getattr(self, field), allowed)
        return sources[-1]

    def _normalize(self) -> None:
        """Bring accepted spellings (lists, null, a rope_scaling object, int for float) to one form."""
        for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                _refuse(name, value, "a list of integers")
            object.__setattr__(self, name, tuple(value))
        for name in ("rope_theta", "compress_rope_theta", "rms_norm_eps", "initializer_range"):
            object.__setattr__(self, name, _positive_float(name, getattr(self, name)))
        if not isinstance(self.rope_scaling, YarnScaling):
            object.__setattr__(self, "rope_scaling", _yarn(self.rope_scaling))
        nothing = {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0}
        for name, value in nothing.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.intermediate_size is None and _is_int(self.hidden_size):
            object.__setattr__(self, "intermediate_size", -(-8 * self.hidden_size // (3 * 32)) * 32)

    def _check_numbers(self) -> None:
        for field in fields(self):
            # With `from __future__ import annotations` a field's type is its spelling.
            if field.type == "int" and not field.name.startswith("candidate_"):
                _check_int(field.name, getattr(self, field.name), minimum=1)
        _check_int("candidate_source_layer_id", self.candidate_source_layer_id, minimum=-1)
        for name in ("candidate_topk_blocks", "candidate_block_size"):
            _check_int(name, getattr(self, name), minimum=0 if self.candidate_source_layer_id < 0 else 1)
        for i, ratio in enumerate(self.compress_ratios):
            _check_int(f"compress_ratios[{i}]", ratio, minimum=0)
        if self.rope_scaling is not None and self.compress_rope_theta <= 1:
            _refuse("compress_rope_theta", self.compress_rope_theta, "a number > 1 where YaRN scales it")

    def _check_widths(self) -> None:
        for name in ("head_dim", "index_head_dim"):
            width = getattr(self, name)
            if width % QUANTIZATION_GROUP:
                _refuse(name, width, f"a multiple of {QUANTIZATION_GROUP}, the quantization group")
            if self.qk_rope_head_dim > width:
                _refuse("qk_rope_head_dim", self.qk_rope_head_dim, f"at most {name} = {width}")
        if self.qk_rope_head_dim % 2:
            _refuse("qk_rope_head_dim", self.qk_rope_head_dim, "an even number, channels rotate in pairs")
        if self.num_attention_heads % self.o_groups:
            heads = self.num_attention_heads
            _refuse("o_groups", self.o_groups, f"a divisor of num_attention_heads = {heads}")

    def _check_sources(self) -> None:
        layers = self.num_hidden_layers
        if len(self.compress_ratios) != layers:
            allowed = f"one ratio a layer, num_hidden_layers = {layers}, not {len(self.compress_ratios)}"
            _refuse("compress_ratios", self.compress_ratios, allowed)
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            sources = getattr(self, name)
            for i, layer in enumerate(sources):
                if not _is_int(layer) or not 0 <= layer < layers:
                    _refuse(f"{name}[{i}]", layer, f"an integer from 0 to {layers - 1}")
                if self.compress_ratios[layer] == 0:
                    allowed = f"a layer with compress ratio > 0, and layer {layer} has ratio 0, window only"
                    _refuse(f"{name}[{i}]", layer, allowed)
            if any(a >= b for a, b in pairwise(sources)):
                _refuse(name, sources, "layer numbers in strictly ascending order")
        for layer in self.kv_source_layer_ids:
            if layer not in self.index_source_layer_ids:
                allowed = f"with every KV source in it, and KV source layer {layer} is not"
                _refuse("index_source_layer_ids", self.index_source_layer_ids, allowed)
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio > 0:
                self.kv_source(layer)

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        if source < 0:
            return
        if source not in self.index_source_layer_ids:
            allowed = f"-1 or one of index_source_layer_ids = {self.index_source_layer_ids}"
            _refuse("candidate_source_layer_id", source, allowed)
        kept = self.candidate_topk_blocks * self.candidate_block_size
        if kept < self.index_topk:
            allowed = (
                f"blocks enough to hold index_topk = {self.index_topk} positions, and blocks of "
                f"candidate_block_size = {self.candidate_block_size} make {kept}"
            )
            _refuse("candidate_topk_blocks", self.candidate_topk_blocks, allowed)
        ratio = self.compress_ratios[source]
        for layer in self.index_source_layer_ids:
            if layer > source and self.compress_ratios[layer] != ratio:
                # A mask over positions of r tokens says nothing about positions of another r.
                allowed = (
                    f"a layer with the compress ratio of all later index sources: its own is {ratio}, that "
                    f"of layer {layer} is {self.compress_ratios[layer]}"
                )
                _refuse("candidate_source_layer_id", source, allowed)


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{field} is {value!r}: allowed is {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(field: str, value: Any, minimum: int) -> None:
    if not _is_int(value) or value < minimum:
        _refuse(field, value, f"an integer >= {minimum}")


def _positive_float(field: str, value: Any) -> float:
    is_number = _is_int(value) or isinstance(value, float)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        _refuse(field, value, "a finite number > 0")
    return number


def _yarn(values: object) -> YarnScaling | None:
    """Read a rope_scaling object as in config.json: its type (or rope_type) is "yarn"."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        _refuse("rope_scaling", values, 'null or an object of type "yarn"')
    kind = values.get("rope_type", values.get("type"))
    if kind != "yarn":
        _refuse("rope_scaling.type", kind, '"yarn"')
    return _yarn_from(values, {name: name for name in _INFERENCE_YARN_NAMES}, "rope_scaling.")


def _inference_yarn(values: Mapping[str, Any]) -> YarnScaling | None:
    """Read inference/config.json's flat YaRN keys; original_seq_len 0 means none."""
    length = values.get("original_seq_len", 0)
    if _is_int(length) and length == 0:
        return None
    return _yarn_from(values, _INFERENCE_YARN_NAMES, "")


def _yarn_from(values: Mapping[str, Any], names: Mapping[str, str], prefix: str) -> YarnScaling:
    for name in names.values():
        if name not in values:
            raise ConfigError(f"{prefix}{name} is missing: YaRN needs {', '.join(names.values())}")
    return YarnScaling(**{field: values[name] for field, name in names.items()})


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}: allowed is an object")
    return values
