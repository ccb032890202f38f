"""load_attention and save_attention: names, quantized matrices, and refusals that leave the module alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from csa2_compiled.checkpoint import CheckpointError, load_attention, save_attention

GOLDEN = Path(__file__).parents[1] / "golden" / "released_schedule_mini_bf16.safetensors"


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))


class Compressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wkv = nn.Linear(70, 64, bias=False)
        self.norm = Norm(64)


class Attention(nn.Module):
    """The parameter names of an attention layer; widths that are no multiples of the scale block."""

    def __init__(self, layer_idx: int, full: bool = False) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.wq_a = nn.Linear(70, 40, bias=False)
        self.q_norm = Norm(40)
        self.wo_b = nn.Linear(64, 70, bias=False, dtype=torch.bfloat16)
        self.attn_sink = nn.Parameter(torch.randn(4))
        if full:
            self.compressor = Compressor()


class Block(nn.Module):
    def __init__(self, layer_idx: int, full: bool) -> None:
        super().__init__()
        self.attn = Attention(layer_idx, full)
        self.ffn = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block(i, full=i == 1) for i in range(3))


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(module: nn.Module, expected: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def quantized(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A random E4M3 matrix and its E8M0 scales, one per 32x32 block."""
    weight = (100 * torch.randn(rows, columns)).to(torch.float8_e4m3fn)
    exponents = torch.randint(-12, 4, (-(-rows // 32), -(-columns // 32)))
    return weight, torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """The same, element by element."""
    values = weight.float()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            values[row, column] *= scale[row // 32, column // 32].float()
    return values


@pytest.mark.parametrize("prefix", ["", "layers.1.attn.", "model.layers.1.attn."])
def test_layer_plain(prefix: str, tmp_path: Path) -> None:
    source, layer = Attention(1, full=True), Attention(1, full=True)
    tensors = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    others = {"layers.0.attn.wq_a.weight": torch.zeros(1), "layers.11.attn.wq_a.weight": torch.zeros(1)}
    save_file(tensors | others, tmp_path / "layer.safetensors")
    load_attention(layer, tmp_path / "layer.safetensors")
    assert_equal(layer, copy_of(source))


def test_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    layer = Attention(0)
    before = dict(layer.named_parameters())
    save_attention(Attention(0), tmp_path / "layer.safetensors")
    load_attention(layer, str(tmp_path / "layer.safetensors"))
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())
    assert all(parameter.requires_grad for parameter in before.values())


def test_model_round_trip_ignores_the_rest(tmp_path: Path) -> None:
    source, model = Model(), Model()
    save_attention(source, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {name for name in source.state_dict() if ".attn." in name}
    others = {"embed.weight": torch.zeros(2), "layers.0.ffn.weight": torch.zeros(2)}
    others |= {"layers.3.attn.new": torch.zeros(2), "mtp.0.attn.wq_a.weight": torch.zeros(2)}
    save_file(saved | others, tmp_path / "model.safetensors")
    expected = copy_of(model)
    load_attention(model, tmp_path / "model.safetensors")
    assert_equal(model, expected | {name: source.state_dict()[name] for name in saved})


def test_compiled_wrapper(tmp_path: Path) -> None:
    source, layer = Attention(0), Attention(0)
    wrapped: Any = torch.compile(source), torch.compile(layer)
    save_attention(wrapped[0], tmp_path / "layer.safetensors")
    load_attention(wrapped[1], tmp_path / "layer.safetensors")
    assert_equal(layer, copy_of(source))


def test_conversion_to_the_parameters_dtype(tmp_path: Path) -> None:
    layer, tensors = Attention(0), copy_of(Attention(0))
    tensors |= {"wq_a.weight": tensors["wq_a.weight"].bfloat16(), "wo_b.weight": torch.randn(70, 64).double()}
    save_file(tensors, tmp_path / "layer.safetensors")
    load_attention(layer, tmp_path / "layer.safetensors")
    expected = {
        "wq_a.weight": tensors["wq_a.weight"].float(),
        "wo_b.weight": tensors["wo_b.weight"].bfloat16(),
    }
    assert_equal(layer, tensors | expected)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_released_quantization(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    layer, tensors = Attention(0), copy_of(Attention(0))
    expected = dict(tensors)
    for name, shape, dtype in (("wq_a", (40, 70), torch.float32), ("wo_b", (70, 64), torch.bfloat16)):
        weight, scale = quantized(*shape)
        tensors |= {f"{name}.weight": weight, f"{name}.scale": scale.to(scale_dtype)}
        expected[f"{name}.weight"] = dequantized(weight, scale).to(dtype)
    tensors = {f"layers.0.attn.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "layer.safetensors")
    load_attention(layer, tmp_path / "layer.safetensors")
    assert_equal(layer, expected)


def sharded(model: nn.Module, directory: Path) -> dict[str, str]:
    """Save the model in two files, cutting through layer 1; which file holds which key."""
    save_attention(model, directory / "all.safetensors")
    tensors = load_file(directory / "all.safetensors")
    (directory / "all.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, directory / file)
    return {key: file for file, keys in shards.items() for key in keys}


@pytest.mark.parametrize("index", [True, False])
def test_directory(index: bool, tmp_path: Path) -> None:
    source, model = Model(), Model()
    weight_map = sharded(source, tmp_path)
    if index:
        # With an index other files do not count, nor files of which nothing is needed.
        save_file({"layers.0.attn.new": torch.zeros(2)}, tmp_path / "old.safetensors")
        weight_map["embed.weight"] = "absent.safetensors"
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = copy_of(model) | {k: v for k, v in copy_of(source).items() if ".attn." in k}
    load_attention(model, tmp_path)
    assert_equal(model, expected)


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    """A module with parameters of these (dotted) names and shapes."""
    module = nn.Module()
    for name, tensor in tensors.items():
        owner = module
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name.split(".")[-1], nn.Parameter(torch.zeros_like(tensor)))
    return module


@pytest.mark.parametrize("layer_idx", [0, 1, 5, 7, 8])  # window, full (ratios 2 and 1), reindex, reuse
def test_golden_names_and_dtypes(layer_idx: int) -> None:
    prefix = f"layers.{layer_idx}.attn."
    tensors = {
        name.removeprefix(prefix): tensor for name, tensor in load_file(GOLDEN).items() if name.startswith(prefix)
    }
    layer = module_of(tensors)
    layer.layer_idx = layer_idx  # type: ignore[assignment]
    load_attention(layer, GOLDEN)
    assert_equal(layer, tensors)


def refused(module: nn.Module, path: Path, *mentioned: str) -> None:
    """load_attention names what is wrong, and the module is as before."""
    before = copy_of(module)
    with pytest.raises(CheckpointError) as error:
        load_attention(module, path)
    for text in mentioned:
        assert text in str(error.value), str(error.value)
    assert_equal(module, before)


WEIGHT, SCALE = quantized(40, 70)
NAN_SCALE = torch.full((2, 3), float("nan"))
ERRORS = {
    "shape": ({"wq_a.weight": torch.ones(40, 71)}, "has shape [40, 71]: allowed is [40, 70]"),
    "transposed": ({"wq_a.weight": torch.ones(70, 40)}, "has shape [70, 40]: allowed is [40, 70]"),
    "integers": ({"wq_a.weight": torch.ones(40, 70, dtype=torch.int8)}, "has dtype I8"),
    "e5m2": ({"wq_a.weight": WEIGHT.to(torch.float8_e5m2)}, "has dtype F8_E5M2"),
    "e4m3 vector": (
        {"q_norm.weight": torch.ones(40).to(torch.float8_e4m3fn)},
        "has dtype F8_E4M3, shape [40]",
    ),
    "no scale": ({"wq_a.weight": WEIGHT}, "layers.2.attn.wq_a.scale is missing: allowed is F8_E8M0 or F32"),
    "scale shape": ({"wq_a.weight": WEIGHT, "wq_a.scale": SCALE[:1].clone()}, "F8_E8M0 of shape [1, 3]"),
    "scale dtype": ({"wq_a.weight": WEIGHT, "wq_a.scale": SCALE.bfloat16()}, "BF16 of shape [2, 3]"),
    "scale value": ({"wq_a.weight": WEIGHT, "wq_a.scale": NAN_SCALE}, "wq_a.scale holds a scale that is NaN"),
    "idle scale": ({"wq_a.scale": SCALE}, "layers.2.attn.wq_a.scale is unknown to layer 2"),
    "unknown": ({"wq_c.weight": torch.ones(2)}, "layers.2.attn.wq_c.weight is unknown to layer 2"),
    "not a consumer": (
        {"compressor.wkv.weight": torch.ones(64, 70)},
        "layers.2.attn.compressor.wkv.weight is unknown to layer 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_tensors(name: str, tmp_path: Path) -> None:
    change, message = ERRORS[name]
    model, path = Model(), tmp_path / "model.safetensors"
    save_attention(Model(), path)
    # The last layer is the bad one, so that a load layer by layer would have changed the first two.
    change = {f"layers.2.attn.{key}": tensor for key, tensor in change.items()}
    save_file(load_file(path) | change, path)
    refused(model, path, str(path), message)


def test_missing_keys(tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "model.safetensors"
    save_attention(Model(), path)
    tensors = load_file(path)
    del tensors["layers.2.attn.attn_sink"]
    save_file(tensors, path)
    refused(model, path, str(path), "keys of layer 2 are missing: attn_sink")
    # A layer that consumes has no compressor to give to one that must compress.
    save_attention(Attention(1), path)
    refused(Attention(1, full=True), path, "missing: compressor.wkv.weight, compressor.norm.weight;")
    refused(Attention(4), path, "keys of layer 4 are missing", "layers.4.attn.attn_sink")


def test_ambiguous_keys(tmp_path: Path) -> None:
    layer = Attention(0)
    for first, second in (("", "layers.0.attn."), ("layers.0.attn.", "model.layers.0.attn.")):
        tensors = {prefix + name: tensor for prefix in (first, second) for name, tensor in copy_of(layer).items()}
        save_file(tensors, tmp_path / "layer.safetensors")
        refused(layer, tmp_path / "layer.safetensors", "came besides", "allowed is one tensor for it")
    (tmp_path / "layer.safetensors").unlink()
    for file in ("a.safetensors", "b.safetensors"):
        save_attention(layer, tmp_path / file)
    refused(layer, tmp_path, "a.safetensors", "b.safetensors", "came besides")


def test_bare_keys_are_for_one_layer(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_file(copy_of(Attention(0)), path)
    refused(Model(), path, "keys of layer 0 are missing")
    save_file(copy_of(Attention(0)) | {"wq_c.weight": torch.ones(2)}, path)
    refused(Attention(0), path, "wq_c.weight is unknown to layer 0")


def test_unreadable_files(tmp_path: Path) -> None:
    layer, path = Attention(0), tmp_path / "layer.safetensors"
    save_attention(layer, path)
    content = path.read_bytes()
    for bad in (content[:-10], content[:20], b"", b"not a checkpoint" * 9):
        path.write_bytes(bad)
        refused(layer, path, f"{path} cannot be read", "a whole safetensors file")
        refused(layer, tmp_path, f"{path} cannot be read")
    path.unlink()
    refused(layer, path, f"{path} cannot be read")
    refused(layer, tmp_path, f"{tmp_path} holds no file")


def test_bad_index(tmp_path: Path) -> None:
    model, index = Model(), tmp_path / "model.safetensors.index.json"
    weight_map = sharded(model, tmp_path)
    key = "layers.2.attn.attn_sink"
    for bad in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}'):
        index.write_text(bad)
        refused(model, tmp_path, f"{index} is no index")
    for file in ("../b.safetensors", "/b.safetensors", "..", "."):
        index.write_text(json.dumps({"weight_map": weight_map | {key: file}}))
        refused(model, tmp_path, f"{index}: {key} is in", "a file beside the index")
    for file in ("absent.safetensors", "a.safetensors"):  # no such file; a file without that key
        index.write_text(json.dumps({"weight_map": weight_map | {key: file}}))
        refused(model, tmp_path, str(tmp_path / file), "cannot be read")


def test_meta_device_is_refused(tmp_path: Path) -> None:
    save_attention(Attention(0), tmp_path / "layer.safetensors")
    with pytest.raises(CheckpointError, match=r"attn_sink of layer 0 is on the meta device"):
        load_attention(Attention(0).to("meta"), tmp_path / "layer.safetensors")


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU()])})])
def test_other_modules(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no int layer_idx"):
        load_attention(module, tmp_path)
    with pytest.raises(TypeError, match="has no int layer_idx"):
        save_attention(module, tmp_path / "layer.safetensors")


def test_save_replaces_only_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_attention(Attention(0), path)
    before = path.read_bytes()
    with pytest.raises(NotImplementedError):
        save_attention(Attention(0).to("meta"), path)
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_attention(Attention(0), tmp_path / "directory")
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["directory", "layer.safetensors"]
