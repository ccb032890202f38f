"""Generation: a prompt goes into the cache in chunks, then one token a row comes out a step."""

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from csa2_compiled.cache import CSA2Cache
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.decode import DecodeStep
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.tokens import CSA2InputError

STOPPED = -1  # what a row yields once it has ended
_CACHE_BLOCK = 256  # tokens


def generate(
    model: CSA2ForCausalLM | CompiledModel,
    prompt: Tensor | bytes,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: bytes | Collection[int] = (),
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    cache: CSA2Cache | None = None,
    chunk_size: int = 512,
) -> Iterator[Tensor]:
    """Yield the tokens that follow a prompt, int64 [B] a step, as they are made.

    prompt: int [B, S], or bytes for one row of a byte-level model; rows of other lengths are right-padded, with
    attention_mask [B, S]. temperature: 0 takes the likeliest token. top_k, top_p: sample among the k likeliest tokens,
    and among the fewest that hold a probability of p together. stop: tokens that end a row; it then yields STOPPED
    (-1), and the iterator ends with the last row. seed: of the sampling; None draws one. cache: continues what it
    holds, with room for S + max_new_tokens - 1 more; None makes one. chunk_size: tokens of the prompt that run at once.

    The prompt runs eagerly, also where model is compiled; steps run as `DecodeStep` does. On CUDA nothing waits for
    the device unless `stop` is given, which reads each token. Arguments are checked at the call, before the first
    token is asked for: raises CSA2InputError.
    """
    eager = model.module if isinstance(model, CompiledModel) else model
    if not isinstance(eager, CSA2ForCausalLM):
        raise TypeError(f"model is a {type(eager).__name__}; it must be a CSA2ForCausalLM, compiled or not")
    place = eager.embed.weight.device
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=place) if isinstance(prompt, bytes) else prompt
    if not isinstance(ids, Tensor):
        raise CSA2InputError(f"prompt is a {type(prompt).__name__}; it must be bytes or an integer tensor [B, S]")
    _check_sampling(temperature, top_k, top_p)
    _check_stop(stop, eager.cfg.vocab_size)
    _check_seed(seed)
    _check_at_least("max_new_tokens", max_new_tokens, 1)
    _check_at_least("chunk_size", chunk_size, 1)
    eager.check_inputs(ids, attention_mask=attention_mask)
    if attention_mask is not None and bool((attention_mask[:, 0] == 0).any()):
        raise CSA2InputError("attention_mask has a row without a token; every row of the prompt needs one")
    needed = ids.shape[1] + max_new_tokens - 1
    if cache is None:
        # In whole blocks, so that a compiled step serves prompts of other lengths too.
        room = max(needed, min(-(-needed // _CACHE_BLOCK) * _CACHE_BLOCK, eager.cfg.max_position_embeddings))
        cache = CSA2Cache(eager.cfg, ids.shape[0], room, dtype=eager.embed.weight.dtype, device=place)
    else:
        eager.check_inputs(ids[:, :1], cache)
        held = int(cache.lengths.max())
        if held + needed > cache.max_seq_len:
            raise CSA2InputError(
                f"cache has room for max_seq_len = {cache.max_seq_len} tokens a row; it holds up to {held}, and prompt "
                f"and new tokens need {needed} more"
            )
    generator = torch.Generator(place)
    generator.seed() if seed is None else generator.manual_seed(seed)
    ends = torch.tensor(sorted(set(stop)), dtype=torch.int64, device=place)
    step = DecodeStep(model, cache)

    @torch.no_grad()
    def tokens() -> Iterator[Tensor]:
        logits = prefill(eager, ids, cache, attention_mask, chunk_size)
        ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=place)
        for remaining in reversed(range(max_new_tokens)):
            token = sample(logits, temperature, top_k, top_p, generator)
            yield torch.where(ended, STOPPED, token)
            if len(ends) > 0:
                ended = ended | torch.isin(token, ends)
                if bool(ended.all()):
                    return
            if remaining:
                logits = step(token.unsqueeze(1))[:, -1]

    return tokens()


@torch.no_grad()
def prefill(
    model: CSA2ForCausalLM, ids: Tensor, cache: CSA2Cache, attention_mask: Tensor | None = None, chunk_size: int = 512
) -> Tensor:
    """Run a prompt [B, S] into the cache, chunk by chunk; returns the logits after each row's last token, [B, V]."""
    last = None
    for start in range(0, ids.shape[1], chunk_size):
        chunk = ids[:, start : start + chunk_size]
        mask = None if attention_mask is None else attention_mask[:, start : start + chunk_size]
        logits = model(chunk, cache, mask)
        if mask is None:
            last = logits[:, -1]
            continue
        count = (mask != 0).sum(1)
        newest = logits[torch.arange(len(count), device=count.device), (count - 1).clamp(min=0)]
        last = newest if last is None else torch.where((count > 0).unsqueeze(1), newest, last)
    assert last is not None
    return last


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token a row from logits [..., V], int64 [...]; arguments as in `generate`. Never waits for the device."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    least_positive = torch.finfo(logits.dtype).tiny
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = torch.where(logits >= least, logits, float("-inf"))
    # Relative to the best, so that no temperature makes an infinity of it.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, least_positive)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True)
        kept = torch.where(ranked.cumsum(-1) - ranked < max(top_p, least_positive), ranked, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    # The least of exponential waiting times, as torch.multinomial draws it, which however waits for the device.
    waiting = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / waiting).argmax(-1)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise CSA2InputError(f"temperature is {temperature}; it must be a finite number of at least 0 (0: greedy)")
    if top_k is not None:
        _check_at_least("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise CSA2InputError(f"top_p is {top_p}; it must be above 0 and at most 1")


def _check_stop(stop: bytes | Collection[int], vocab_size: int) -> None:
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in stop):
        raise CSA2InputError(f"stop is {stop!r}; it must be bytes, or integers within 0 and {vocab_size - 1}")


def _check_seed(seed: int | None) -> None:
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise CSA2InputError(f"seed is {seed!r}; it must be None or an integer within 0 and 2^64 - 1")


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CSA2InputError(f"{name} is {value!r}; it must be an integer of at least {least}")
