"""CSA2Config: presets, the JSON layouts it reads, the layer schedule, and every value it refuses."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from csa2_compiled.config import ConfigError, CSA2Config, LayerRole, RotaryParameters, YarnScaling

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))
YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def golden_arguments(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["args"])


def inference_arguments() -> dict:
    """tiny() in the names of inference/config.json."""
    values = CSA2Config.tiny().to_dict()
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim",
        "rms_norm_eps": "norm_eps",
        "sliding_window": "window_size",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": "inter_dim",
    }
    del values["rope_scaling"], values["initializer_range"]
    values = {names.get(name, name): value for name, value in values.items()}
    return {**values, "original_seq_len": 0, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1}


def test_v41_flash_schedule() -> None:
    config = CSA2Config.v41_flash()
    roles = config.layer_roles
    assert [i for i, role in enumerate(roles) if role is LayerRole.WINDOW] == [0, 1]
    assert [i for i, role in enumerate(roles) if role is LayerRole.FULL] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role is LayerRole.REINDEX] == [24, 28, 32, 36]
    assert roles.count(LayerRole.REUSE) == 30
    assert [config.kv_source(i) for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(i) for i in (7, 19, 23, 24, 35, 39)] == [2, 14, 20, 24, 32, 36]
    assert [i for i in range(40) if config.publishes_candidates(i)] == [20]
    assert [i for i in range(40) if config.selects_within_candidates(i)] == [24, 28, 32, 36]
    assert config.rotary_parameters(1) == RotaryParameters(10000.0, None)
    assert config.rotary_parameters(39) == RotaryParameters(160000.0, YarnScaling(**_without_type(YARN)))


def test_tiny_has_every_role() -> None:
    config = CSA2Config.tiny()
    assert set(config.layer_roles) == set(LayerRole)
    assert config.layer_roles[7] is config.role(7) is LayerRole.REINDEX
    assert config.rotary_parameters(2) == RotaryParameters(160000.0, None)
    assert config.vocab_size == 256


def test_sources_are_of_the_same_ratio() -> None:
    config = replace(
        CSA2Config.tiny(),
        num_hidden_layers=5,
        compress_ratios=(4, 2, 4, 2, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=-1,
    )
    assert [config.kv_source(i) for i in range(4)] == [0, 1, 0, 1]
    assert [config.index_source(i) for i in range(4)] == [0, 1, 0, 1]
    assert not any(config.publishes_candidates(i) or config.selects_within_candidates(i) for i in range(5))


@pytest.mark.parametrize("method", ["kv_source", "index_source"])
def test_window_layer_has_no_source(method: str) -> None:
    with pytest.raises(ConfigError, match="layer 1 has compress ratio 0"):
        getattr(CSA2Config.tiny(), method)(1)


@pytest.mark.parametrize("layer", [-1, 9, True, 1.0])
@pytest.mark.parametrize(
    "method",
    [
        "role",
        "kv_source",
        "index_source",
        "publishes_candidates",
        "selects_within_candidates",
        "rotary_parameters",
    ],
)
def test_layer_outside_the_model(method: str, layer: object) -> None:
    with pytest.raises(ConfigError, match=f"layer is {layer}: allowed is an integer from 0 to 8"):
        getattr(CSA2Config.tiny(), method)(layer)


def test_frozen_and_hashable() -> None:
    ratios: Any = list(CSA2Config.tiny().compress_ratios)
    config = replace(CSA2Config.tiny(), compress_ratios=ratios)
    assert config == CSA2Config.tiny()
    assert len({config, CSA2Config.tiny(), CSA2Config.v41_flash()}) == 2
    with pytest.raises(FrozenInstanceError):
        config.head_dim = 32  # type: ignore[misc]


@pytest.mark.parametrize("config", [CSA2Config.tiny(), CSA2Config.v41_flash()], ids=["tiny", "v41_flash"])
def test_round_trip(config: CSA2Config, tmp_path: Path) -> None:
    config.to_json(tmp_path / "config.json")
    assert CSA2Config.from_json(tmp_path / "config.json") == config
    assert CSA2Config.from_json(str(tmp_path / "config.json")) == config
    assert CSA2Config.from_json(config.to_dict()) == config
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_nested_and_unknown_keys() -> None:
    text = {**CSA2Config.v41_flash().to_dict(), "n_routed_experts": 256, "rope_scaling": YARN}
    nested = {"text_config": text, "vision_config": {"hidden_size": 7}, "hidden_size": 3}
    assert CSA2Config.from_json(nested) == CSA2Config.from_json(text) == CSA2Config.v41_flash()


def test_optional_keys() -> None:
    values = CSA2Config.tiny().to_dict()
    for name in ("rope_scaling", "vocab_size", "intermediate_size", "initializer_range"):
        del values[name]
    values |= {"candidate_source_layer_id": None, "candidate_topk_blocks": None, "candidate_block_size": 0}
    config = CSA2Config.from_json(values)
    assert (config.rope_scaling, config.vocab_size, config.candidate_source_layer_id) == (None, 256, -1)
    assert config.intermediate_size == 352  # 8/3 * 128 = 341.3, rounded up to a multiple of 32


def test_inference_layout() -> None:
    assert CSA2Config.from_json(inference_arguments()) == CSA2Config.tiny()
    scaled = CSA2Config.from_json({**inference_arguments(), "original_seq_len": 65536})
    assert scaled.rope_scaling == YarnScaling(**_without_type(YARN))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_arguments(path: Path) -> None:
    arguments = golden_arguments(path)
    config = CSA2Config.from_json(arguments)
    assert config.hidden_size == arguments["dim"]
    assert config.sliding_window == arguments["window_size"]
    assert config.compress_ratios == tuple(arguments["compress_ratios"])
    assert config.candidate_source_layer_id == arguments["candidate_source_layer"]
    assert (config.rope_scaling is None) == (arguments["original_seq_len"] == 0)
    assert CSA2Config.from_json(config.to_dict()) == config


def test_missing_keys() -> None:
    for name in ("hidden_size", "compress_ratios", "rms_norm_eps", "index_topk"):
        values = CSA2Config.tiny().to_dict()
        del values[name]
        with pytest.raises(ConfigError, match=f"^{name} is missing"):
            CSA2Config.from_json(values)
    for name in ("dim", "n_heads", "kv_source_layers"):
        values = inference_arguments()
        del values[name]
        with pytest.raises(ConfigError, match=f"^{name} is missing"):
            CSA2Config.from_json(values)
    values = {**inference_arguments(), "original_seq_len": 64}
    del values["rope_factor"]
    with pytest.raises(ConfigError, match=r"^rope_factor is missing"):
        CSA2Config.from_json(values)
    yarn = {name: value for name, value in YARN.items() if name != "beta_slow"}
    with pytest.raises(ConfigError, match=r"^rope_scaling\.beta_slow is missing"):
        CSA2Config.from_json({**CSA2Config.tiny().to_dict(), "rope_scaling": yarn})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b"[1]", "holds a JSON list: allowed is an object"),
        (b"null", "holds a JSON NoneType: allowed is an object"),
    ],
    ids=["cut", "not utf-8", "too deep", "list", "null"],
)
def test_unreadable_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        CSA2Config.from_json(path)
    assert str(path) in str(error.value)


def test_path_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        CSA2Config.from_json(tmp_path)
    with pytest.raises(FileNotFoundError):
        CSA2Config.from_json(tmp_path / "absent.json")


COUNTS = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
    "vocab_size",
    "intermediate_size",
]
BAD_VALUES = [
    *((name, value, name) for name in COUNTS for value in (0, -1, True, 64.0, "64")),
    *((name, None, name) for name in COUNTS if name != "intermediate_size"),
    *(
        (name, value, name)
        for name in ("rope_theta", "compress_rope_theta", "rms_norm_eps", "initializer_range")
        for value in (0, -1.0, float("inf"), float("nan"), 10**400, True, "1", None)
    ),
    ("head_dim", 80, "head_dim"),
    ("index_head_dim", 48, "index_head_dim"),
    ("qk_rope_head_dim", 31, "qk_rope_head_dim"),
    ("qk_rope_head_dim", 66, "qk_rope_head_dim"),
    ("o_groups", 3, "o_groups"),
    *(
        (name, value, name)
        for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
        for value in (None, 2, "2", {2})
    ),
    ("compress_ratios", (0, 0, 2), "compress_ratios"),
    ("compress_ratios", (0, 0, 2, 2, 2, 1, 1, 1, -1), "compress_ratios[8]"),
    ("compress_ratios", (0, 0, 2, 2, 2.0, 1, 1, 1, 1), "compress_ratios[4]"),
    ("compress_ratios", (0, 0, 2, 2, 2, True, 1, 1, 1), "compress_ratios[5]"),
    ("kv_source_layer_ids", (2, 9), "kv_source_layer_ids[1]"),
    ("kv_source_layer_ids", (-1, 5), "kv_source_layer_ids[0]"),
    ("kv_source_layer_ids", (2, 5.0), "kv_source_layer_ids[1]"),
    ("kv_source_layer_ids", (1, 5), "kv_source_layer_ids[0]"),
    ("kv_source_layer_ids", (5, 2), "kv_source_layer_ids"),
    ("kv_source_layer_ids", (2, 2, 5), "kv_source_layer_ids"),
    ("kv_source_layer_ids", (2,), "kv_source_layer_ids"),
    ("kv_source_layer_ids", (), "kv_source_layer_ids"),
    ("index_source_layer_ids", (2, 5, 9), "index_source_layer_ids[2]"),
    ("index_source_layer_ids", (0, 2, 5), "index_source_layer_ids[0]"),
    ("index_source_layer_ids", (2, 7, 5), "index_source_layer_ids"),
    ("index_source_layer_ids", (2, 7), "index_source_layer_ids"),
    ("candidate_source_layer_id", -2, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 6, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 9, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 5.0, "candidate_source_layer_id"),
    ("candidate_source_layer_id", True, "candidate_source_layer_id"),
    ("candidate_source_layer_id", 2, "candidate_source_layer_id"),  # its ratio 2 is not that of 5 and 7
    ("candidate_topk_blocks", 0, "candidate_topk_blocks"),
    ("candidate_topk_blocks", 7, "candidate_topk_blocks"),  # 7 * 4 < 32
    ("candidate_topk_blocks", 16.0, "candidate_topk_blocks"),
    ("candidate_block_size", 0, "candidate_block_size"),
    ("candidate_block_size", True, "candidate_block_size"),
    ("rope_scaling", 16, "rope_scaling"),
    ("rope_scaling", {**YARN, "type": "linear"}, "rope_scaling.type", "linear"),
    ("rope_scaling", {"factor": 2}, "rope_scaling.type", None),
    ("rope_scaling", {**YARN, "factor": 0.5}, "rope_scaling.factor", 0.5),
    ("rope_scaling", {**YARN, "factor": True}, "rope_scaling.factor", True),
    ("rope_scaling", {**YARN, "beta_fast": 0.5}, "rope_scaling.beta_fast", 0.5),
    ("rope_scaling", {**YARN, "beta_slow": 0}, "rope_scaling.beta_slow", 0),
    *(
        (
            "rope_scaling",
            {**YARN, "original_max_position_embeddings": value},
            "rope_scaling.original_max_position_embeddings",
            value,
        )
        for value in (0, 64.0)
    ),
]


@pytest.mark.parametrize("case", BAD_VALUES, ids=lambda case: f"{case[0]}={str(case[1])[:40]}")
def test_bad_values(case: tuple) -> None:
    """A case: the field, its value, the field that the message must name, and the value that it must name
    where that is not the whole value."""
    field, value, named, *part = case
    with pytest.raises(ConfigError) as error:
        replace(CSA2Config.tiny(), **{field: value})
    message = str(error.value)
    shown = part[0] if part else value
    if "[" in named:
        shown = value[int(named.split("[")[1][:-1])]
    assert message.startswith(f"{named} is {shown!r}: allowed is "), message


@pytest.mark.parametrize(
    "change",
    [
        {"index_head_dim": 32},  # as wide as the rotary channels
        {"candidate_topk_blocks": 8},  # 8 * 4 positions, just index_topk
        {"candidate_source_layer_id": 7},  # the last index source
        {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0},
        {"o_groups": 4},
        {"sliding_window": 1},
    ],
)
def test_values_at_the_bounds(change: dict) -> None:
    config = replace(CSA2Config.tiny(), **change)
    assert all(getattr(config, name) == value for name, value in change.items())


def test_messages_name_the_layer() -> None:
    with pytest.raises(ConfigError, match="one source of ratio 1 at or before layer 5"):
        replace(CSA2Config.tiny(), kv_source_layer_ids=(2, 7))
    with pytest.raises(ConfigError, match="KV source layer 5 is not"):
        replace(CSA2Config.tiny(), index_source_layer_ids=(2, 7))
    with pytest.raises(ConfigError, match="of layer 5 is 1"):
        replace(CSA2Config.tiny(), candidate_source_layer_id=2)


def test_yarn_needs_a_base_above_one() -> None:
    with pytest.raises(ConfigError, match=r"compress_rope_theta is 1\.0: allowed is a number > 1"):
        replace(CSA2Config.v41_flash(), compress_rope_theta=1)


def test_text_config_must_be_an_object() -> None:
    with pytest.raises(ConfigError, match="text_config is None: allowed is an object"):
        CSA2Config.from_json({"text_config": None})


def _without_type(yarn: dict) -> dict:
    return {name: value for name, value in yarn.items() if name != "type"}
