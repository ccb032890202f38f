"""The golden files: outputs of the released code, with the weights and inputs that gave them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from csa2_compiled import CSA2Attention, CSA2Config, load_attention

GOLDEN = Path(__file__).parent / "golden"
FILES = tuple(sorted(path.stem for path in GOLDEN.glob("*.safetensors")))


@dataclass(frozen=True)
class Golden:
    """One golden file: config, dtype, path and its tensors by name."""

    name: str
    path: Path
    cfg: CSA2Config
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["prefill.0.input"].dtype

    @property
    def is_bfloat16(self) -> bool:
        return self.dtype is torch.bfloat16

    def inputs(self) -> list[Tensor]:
        return [self.tensors[f"prefill.{i}.input"] for i in range(self.cfg.num_hidden_layers)]

    def layers(self, device: str = "cpu") -> list[CSA2Attention]:
        layers = []
        for i in range(self.cfg.num_hidden_layers):
            layer = CSA2Attention(self.cfg, i, dtype=self.dtype, device=device)
            load_attention(layer, self.path)
            layers.append(layer.eval())
        return layers


def load_golden(name: str) -> Golden:
    path = GOLDEN / f"{name}.safetensors"
    with safe_open(path, framework="pt") as file:
        cfg = CSA2Config.from_json(json.loads(file.metadata()["args"]))
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    return Golden(name, path, cfg, tensors)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected, in float64."""
    got, expected = got.double().cpu(), expected.double().cpu()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def selection_overlap(got: Tensor, expected: Tensor) -> Tensor:
    """Share of each query's expected selection that was got, float64 [B, S]; 1 where nothing is expected."""
    got, expected = got.cpu(), expected.cpu()
    found = ((expected.unsqueeze(-1) == got.unsqueeze(-2)) & (expected >= 0).unsqueeze(-1)).any(-1).sum(-1)
    wanted = (expected >= 0).sum(-1)
    extra = (got >= 0).sum(-1) - wanted
    share = torch.where(wanted > 0, found / wanted.clamp(min=1), 1.0).double()
    return torch.where(extra == 0, share, 0.0)
