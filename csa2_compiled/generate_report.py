"""What `csa2 generate` does and reports: text as it comes, then rates and the cache's bytes; nothing here prints."""

import codecs
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from csa2_compiled.cache import CSA2Cache
from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.generation import generate
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.model_files import demo_folder, load_model
from csa2_compiled.run_report import BYTE_VALUES, BadArgumentError, Environment, check_length, environment_of
from csa2_compiled.tokens import CSA2InputError


@dataclass(frozen=True)
class GenerateReport:
    """One generation.

    prefill_seconds: until the first token; first_step_seconds: until the second, compilation included, None when
    there was none; tokens_per_second: of the steps after it, None when there were none. compilations: graphs that
    were compiled, None for an eager model.
    """

    environment: Environment
    prompt_bytes: int
    new_bytes: int
    text: str
    prefill_seconds: float
    first_step_seconds: float | None
    tokens_per_second: float | None
    compilations: int | None
    cache_bytes: int
    cache_tokens: int
    packed: bool


def shipped_model() -> Path:
    """The directory of the model that comes with the package. Raises BadArgumentError."""
    try:
        return demo_folder()
    except CheckpointError as error:
        raise BadArgumentError("--model", f"{error}; --model names one") from error


def read_model(path: Path, seq_len: int, device: str, length_argument: str) -> CSA2ForCausalLM:
    """The byte-level model in a directory (see `load_model`), checked to take that many bytes.

    length_argument: what asked for them. Raises BadArgumentError.
    """
    try:
        model = load_model(path, device).eval()
    except CheckpointError as error:
        raise BadArgumentError("--model", error) from error
    if model.cfg.vocab_size != BYTE_VALUES:
        raise BadArgumentError("--model", f"vocab_size is {model.cfg.vocab_size}; bytes come from {BYTE_VALUES} only")
    check_length(model.cfg, seq_len, length_argument)
    return model


def generate_text(
    model: CSA2ForCausalLM | CompiledModel,
    prompt: bytes,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: bytes,
    seed: int,
    packed: bool,
    on_text: Callable[[str], None],
    on_compile: Callable[[], None] = lambda: None,
) -> GenerateReport:
    """Generate bytes after a prompt and hand their text to `on_text` as soon as it is whole UTF-8.

    Bytes that are no UTF-8 come as U+FFFD. on_compile: called once the arguments are checked, where a first step will
    wait for the compiler. Raises BadArgumentError.
    """
    eager = model.module if isinstance(model, CompiledModel) else model
    assert isinstance(eager, CSA2ForCausalLM)
    if eager.cfg.vocab_size != BYTE_VALUES:
        raise BadArgumentError("--config", f"vocab_size is {eager.cfg.vocab_size}; bytes come from {BYTE_VALUES} only")
    place = eager.embed.weight.device
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    try:
        room = len(prompt) + max_new_tokens - 1
        cache = CSA2Cache(eager.cfg, 1, room, dtype=eager.embed.weight.dtype, device=place, packed=packed)
        tokens = generate(model, prompt, max_new_tokens, stop=stop, seed=seed, cache=cache, **options)  # type: ignore[arg-type]
    except CSA2InputError as error:
        name, _, problem = str(error).partition(" ")
        raise BadArgumentError(f"--{name.replace('_', '-')}", problem) from error
    if isinstance(model, CompiledModel) and max_new_tokens > 1:
        on_compile()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces: list[str] = []

    def take(text: str) -> None:
        pieces.append(text)
        on_text(text)

    times, count = [time.perf_counter()], 0
    for token in tokens:
        take(decoder.decode(bytes([int(token)])))
        times.append(time.perf_counter())
        count += 1
    take(decoder.decode(b"", final=True))
    return GenerateReport(
        environment_of(place),
        prompt_bytes=len(prompt),
        new_bytes=count,
        text="".join(pieces),
        prefill_seconds=times[1] - times[0],
        first_step_seconds=times[2] - times[1] if count > 1 else None,
        tokens_per_second=(count - 2) / (times[-1] - times[2]) if count > 2 else None,
        compilations=model.compilations if isinstance(model, CompiledModel) else None,
        cache_bytes=cache.memory_bytes(),
        cache_tokens=room,
        packed=packed,
    )
