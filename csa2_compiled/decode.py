"""One decoding step with everything on the device: no launches, no synchronization, one replayed CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csa2_compiled.cache import CSA2Cache
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.tokens import CSA2InputError


class DecodeStep:
    """A model step of a fixed number of tokens a row, `num_tokens`, with a cache.

    model: a CSA2ForCausalLM or a `compile_model` of one. On CUDA the first step of each object warms the model up and
    captures it as a CUDA graph, which every step replays: rows, positions and lengths are read on the device. On CPU
    a step is a plain call. num_tokens is at most the cache's max_truncate, so that warming up leaves the past intact.
    Raises CSA2InputError.
    """

    def __init__(self, model: CSA2ForCausalLM | CompiledModel, cache: CSA2Cache, num_tokens: int = 1) -> None:
        if not 1 <= num_tokens <= cache.max_truncate:
            raise CSA2InputError(
                f"num_tokens is {num_tokens}; 1 to the cache's max_truncate = {cache.max_truncate} are allowed: "
                "make it with a larger one"
            )
        self.model, self.cache, self.num_tokens = model, cache, num_tokens
        self._ids = torch.zeros(cache.batch_size, num_tokens, dtype=torch.int64, device=cache.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B, num_tokens, vocab_size] of input_ids, int [B, num_tokens]; the cache advances by all of them.

        On CUDA ids are not checked (that would wait for the device), and the next step overwrites the logits.
        """
        if input_ids.shape != self._ids.shape:
            raise CSA2InputError(f"input_ids has shape {tuple(input_ids.shape)}; it must be {list(self._ids.shape)}")
        if self.cache.device.type != "cuda":
            return self.model(input_ids, cache=self.cache)
        if self._graph is None:
            self.model(input_ids, cache=self.cache)  # which checks the ids
            self.cache.advance(0)
            self._capture()
        assert self._graph is not None
        assert self._logits is not None
        self.cache.check_step(self.num_tokens)
        self._ids.copy_(input_ids)
        self._graph.replay()
        self.cache.record.begin(self.num_tokens)
        self.cache.record.end(self.num_tokens)
        return self._logits

    def _capture(self) -> None:
        record = self.cache.record.copy()

        def step() -> None:
            self._logits = self.model(self._ids, cache=self.cache)

        def undone() -> None:
            step()
            self.cache.advance(0)

        self._graph = capture(step, self.cache.device, undone)
        self.cache.record.assign(record)


def capture(
    step: Callable[[], Any], device: torch.device, warm_up: Callable[[], Any] | None = None
) -> torch.cuda.CUDAGraph:
    """Capture a call as a CUDA graph, after three warm-ups on a stream beside: compilation must not be captured.

    warm_up: what the warm-ups call; None is `step`.
    """
    current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        for _ in range(3):
            (warm_up or step)()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
