"""A small model and training batches, for the tests of gradients, checkpointing and distillation."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from csa2_compiled import CSA2Config, CSA2ForCausalLM

# Window, full r=2, reuse, full r=1 with candidates, reindex, reuse.
CONFIG = replace(
    CSA2Config.tiny(),
    num_hidden_layers=6,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
    candidate_topk_blocks=4,
    candidate_block_size=4,
    index_topk=8,
    sliding_window=6,
    max_position_embeddings=128,
    vocab_size=64,
)


def make_model(dtype: torch.dtype = torch.float32, cfg: CSA2Config = CONFIG) -> CSA2ForCausalLM:
    torch.manual_seed(0)
    model = CSA2ForCausalLM(cfg, dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def make_batch(arrangement: str = "plain", tokens: int = 32) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(0, CONFIG.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(1))
    if arrangement == "padded":
        return ids, {"attention_mask": (torch.arange(tokens) < torch.tensor([[tokens], [tokens // 2 + 1]])).long()}
    if arrangement == "packed":
        documents = torch.ones_like(ids)
        documents[0, 12:] = 2
        documents[1, 25:] = 0
        return ids, {"document_ids": documents}
    return ids, {}


def gradients(model: CSA2ForCausalLM, ids: Tensor, **arguments: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss_of(model(ids, **arguments), ids).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def assert_same_bits(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        other = got[name]
        assert (other is None) == (gradient is None), name
        if gradient is not None and other is not None:
            assert torch.equal(other, gradient), name


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))
