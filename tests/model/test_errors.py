"""Every bad input and its error, eager and before compilation; the same rows as the table of docs/errors.md."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import csa2_compiled
from csa2_compiled import (
    CheckpointError,
    CompileCacheError,
    CompiledModel,
    ConfigError,
    CSA2Attention,
    CSA2Cache,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2InputError,
    CSA2State,
    DecodeStep,
    DistillationLosses,
    TrainConfig,
    TrainConfigError,
    TrainDataError,
    Trainer,
    compile_cache,
    compile_model,
    distillation_loss,
    enable_distillation,
    evaluate,
    generate,
    load_attention,
    load_compile_cache,
    load_state,
    save_attention,
    save_compile_cache,
    save_state,
)
from csa2_compiled.kernel_options import forward_tiles
from csa2_compiled.quantization import quantize_dequantize_body, row_bytes
from csa2_compiled.tokens import lay_out_tokens
from csa2_compiled.train_data import read_documents

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
# Layers 0 to 8: window, window, full, reuse, reuse (ratio 2), full with candidates, reuse, reindex, reuse (ratio 1).
CONFIG = replace(CSA2Config.tiny(), max_position_embeddings=32)
# Layer 7 makes its own KV, and selects within the candidates of layer 5 all the same.
SECOND_SOURCE = replace(CONFIG, kv_source_layer_ids=(2, 5, 7))


class Setup:
    """Modules by name, a good input, the states of the two ratios, and caches."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.modules: dict[str, nn.Module] = {
            "window": CSA2Attention(CONFIG, 0),
            "full, ratio 2": CSA2Attention(CONFIG, 2),
            "reuse, ratio 2": CSA2Attention(CONFIG, 3),
            "full": CSA2Attention(CONFIG, 5),
            "reindex": CSA2Attention(CONFIG, 7),
            "second full": CSA2Attention(SECOND_SOURCE, 7),
            "model": CSA2ForCausalLM(CONFIG),
            "dense": CSA2Attention(CONFIG, 0),
        }
        self.modules["dense"].layout = "dense"
        self.x = torch.randn(2, 8, CONFIG.hidden_size)
        self.ids = torch.randint(0, CONFIG.vocab_size, (2, 8))
        with torch.no_grad():
            self.state = self.modules["full"](self.x).state  # ratio 1, with candidates
            self.state_2 = self.modules["full, ratio 2"](self.x).state
        self.compiled = {name: compile_model(module, passes="none") for name, module in self.modules.items()}
        self.caches = self.make_caches()
        self.compiled["regional model"] = compile_model(self.modules["model"], passes="none", regional=True)
        self.before = self.snapshot()

    def make_caches(self) -> dict[str, CSA2Cache]:
        """Of 2 rows and 16 tokens, but for what the name says."""
        caches = {name: CSA2Cache(CONFIG, 2, 16) for name in ("good", "of 12 tokens", "in a step of 5")}
        caches["in a long step"] = CSA2Cache(CONFIG, 2, 16, max_truncate=4)
        with torch.no_grad():
            self.modules["model"](self.ids.repeat(1, 2)[:, :12], caches["of 12 tokens"])
            self.modules["window"](self.x[:, :5], cache=caches["in a step of 5"])
            self.modules["model"](self.ids[:, :3], caches["in a long step"])
            self.modules["full, ratio 2"](self.x, cache=caches["in a long step"])
        caches["of another config"] = CSA2Cache(SECOND_SOURCE, 2, 16)
        caches["of 3 rows"] = CSA2Cache(CONFIG, 3, 16)
        caches["in bfloat16"] = CSA2Cache(CONFIG, 2, 16, torch.bfloat16)
        caches["elsewhere"] = CSA2Cache(CONFIG, 2, 16, device="meta")
        return caches

    def snapshot(self) -> list[Tensor]:
        tensors = [self.x, self.ids]
        for name, cache in self.caches.items():
            tensors += [] if name == "elsewhere" else cache._all_buffers()
        for state in (self.state, self.state_2):
            for publication in state.publications:
                tensors += [value for value in vars(publication).values() if isinstance(value, Tensor)]
        for module in self.modules.values():
            tensors += module.state_dict().values()
        return [tensor.clone() for tensor in tensors]

    def without_candidates(self) -> CSA2State:
        return CSA2State((replace(self.state.publications[0], candidates=None),))

    def short_checkpoint(self) -> Path:
        """A file of layer 5 that lacks attn_sink."""
        path = self.folder / "short.safetensors"
        save_attention(self.modules["full"], path)
        tensors = load_file(path)
        del tensors["layers.5.attn.attn_sink"]
        save_file(tensors, path)
        return path

    def compile_cache(self, payload: bytes = b"", libraries: tuple[tuple[str, int], ...] = (), **header: Any) -> Path:
        """A whole file of `save_compile_cache` with these libraries behind its artifacts, and this in its header."""
        path = self.folder / "graphs.bin"
        size = len(payload) - sum(length for _, length in libraries)
        here = compile_cache.environment(torch.device("cpu"))
        own = {"artifacts": {}, "artifact_bytes": size, "libraries": libraries}
        path.write_bytes(compile_cache.pack({**here, **own, **header}, payload))
        return path

    def damaged_state(self) -> Path:
        """A saved state whose last byte is another one."""
        path = self.folder / "damaged"
        save_state(self.state_2, path, CONFIG, 2)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return path


@dataclass(frozen=True)
class Case:
    """One row of docs/errors.md: argument, what came, error class.

    make: gives the keyword arguments of a call of the module `target`, or itself raises when that is None.
    Target "both" stands for a layer and the model, which take a mask, ids and a cache alike.
    words: all stand in the message: the argument, what came, what is allowed.
    """

    argument: str
    came: str
    error: type[ValueError]
    target: str | None
    make: Callable[[Setup], Any]
    words: tuple[str, ...]

    @property
    def row(self) -> tuple[str, str]:
        return self.argument, self.came

    def modules(self) -> tuple[str, ...]:
        return ("full, ratio 2", "model") if self.target == "both" else (str(self.target),)

    def arguments(self, setup: Setup, module: str) -> dict[str, Any]:
        given = {"input_ids": setup.ids} if module == "model" else {"x": setup.x}
        return {**given, **self.make(setup)}


def _in_bfloat16(state: CSA2State) -> CSA2State:
    publications = (replace(p, compressed_kv=p.compressed_kv.bfloat16()) for p in state.publications)
    return CSA2State(tuple(publications))


def bad_input(argument: str, came: str, target: str, make: Callable[[Setup], Any], *words: str) -> Case:
    return Case(argument, came, CSA2InputError, target, make, words)


def bad_rows(argument: str, came: str, rows: Any, *words: str, **others: Any) -> Case:
    """A bad mask or bad ids, as a tensor or as rows of integers."""
    values = {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in others.items()}
    values[argument.split(" and ")[0]] = rows if isinstance(rows, Tensor) else torch.tensor(rows)
    return bad_input(argument, came, "both", lambda s: values, *words)


def bad_cache(came: str, name: str, *words: str, target: str = "both", **others: Any) -> Case:
    return bad_input("cache", came, target, lambda s: {"cache": s.caches[name], **others}, *words)


def bad_call(argument: str, came: str, make: Callable[[Setup], Any], *words: str) -> Case:
    """A cache that is made or called with a bad argument, or a generation or a decoding step."""
    return Case(argument, came, CSA2InputError, None, make, words)


def bad_config(field: str, came: str, changes: dict[str, Any], *words: str) -> Case:
    return Case(field, came, ConfigError, None, lambda s: replace(CONFIG, **changes), words)


ONES, EIGHT = [1] * 8, torch.ones(2, 8, dtype=torch.int64)

X_CASES = [
    bad_input(
        "x",
        "no tensor",
        "full",
        lambda s: {"x": [1.0]},
        "x is a list",
        "tensor [batch, tokens, hidden_size]",
    ),
    bad_input(
        "x",
        "another number of dimensions",
        "full",
        lambda s: {"x": s.x[0]},
        "x has shape (8, 128)",
        "[batch, tokens, hidden_size 128]",
    ),
    bad_input(
        "x",
        "another hidden size",
        "full",
        lambda s: {"x": s.x[..., :64]},
        "x has shape (2, 8, 64)",
        "[batch, tokens, hidden_size 128]",
    ),
    bad_input(
        "x",
        "another dtype than the layer's",
        "window",
        lambda s: {"x": s.x.double()},
        "x has dtype torch.float64",
        "the layer's is torch.float32",
    ),
    bad_input(
        "x",
        "no tokens",
        "window",
        lambda s: {"x": s.x[:, :0]},
        "x has 0 tokens",
        "1 to max_position_embeddings 32",
    ),
    bad_input(
        "x",
        "more tokens than max_position_embeddings",
        "full",
        lambda s: {"x": s.x.repeat(1, 5, 1)},
        "x has 40 tokens",
        "1 to max_position_embeddings 32",
    ),
]

STATE_CASES = [
    bad_input(
        "state",
        "not a CSA2State",
        "window",
        lambda s: {"state": s.state.publications},
        "state is a tuple",
        "must be a CSA2State",
    ),
    bad_input(
        "state",
        "empty, for a layer that reads from a source",
        "reindex",
        lambda s: {},
        "state holds no source of compress ratio 1",
        "it is empty",
        "layer 7 (reindex, compress ratio 1)",
        "Run layer 5 first",
    ),
    bad_input(
        "state",
        "sources of other compress ratios only",
        "reuse, ratio 2",
        lambda s: {"state": s.state},
        "state holds no source of compress ratio 2",
        "it has ratio [1] only",
        "layer 3 (reuse, compress ratio 2)",
        "Run layer 2 first",
    ),
    bad_input(
        "state",
        "of another batch size",
        "reindex",
        lambda s: {"x": s.x[:1], "state": s.state},
        "state's compressed_kv has shape (2, 8, 64)",
        "layer 7",
        "needs [1, 8, 64]",
        "another batch or length",
    ),
    bad_input(
        "state",
        "of another dtype or device",
        "reuse, ratio 2",
        lambda s: {"x": s.x, "state": _in_bfloat16(s.state_2)},
        "state's compressed_kv is torch.bfloat16",
        "x is torch.float32",
        "both must be alike",
    ),
    bad_input(
        "state",
        "of another length",
        "reuse, ratio 2",
        lambda s: {"x": s.x[:, :6], "state": s.state_2},
        "state's compressed_kv has shape (2, 4, 64)",
        "layer 3",
        "needs [2, 3, 64]",
        "another batch or length",
    ),
    bad_input(
        "state",
        "of a length with as many whole groups",
        "reuse, ratio 2",
        lambda s: {"x": torch.cat([s.x, s.x[:, :1]], dim=1), "state": s.state_2},
        "state's topk_indices are of 8 tokens",
        "layer 3",
        "needs 9",
        "another length",
    ),
    bad_input(
        "state",
        "without candidates, for a reindex layer after the candidate source",
        "reindex",
        lambda s: {"state": s.without_candidates()},
        "state holds no candidates",
        "layer 7 (reindex, compress ratio 1)",
        "run layer 5 first",
    ),
    bad_input(
        "state",
        "without candidates, for a KV source after the candidate source",
        "second full",
        lambda s: {},
        "state holds no candidates",
        "layer 7 (full, compress ratio 1)",
        "run layer 5 first",
    ),
    bad_input(
        "state",
        "with candidates of another length, for a KV source after the candidate source",
        "second full",
        lambda s: {"x": s.x[:, :7], "state": s.state},
        "state's candidates have shape (2, 8, 8)",
        "layer 7",
        "needs [2, 7, 7]",
    ),
]

MASK_CASES = [
    bad_rows(
        "attention_mask",
        "another shape than [batch, tokens]",
        EIGHT[:, :7],
        "attention_mask has shape (2, 7)",
        "[batch, tokens] = [2, 8]",
    ),
    bad_rows(
        "attention_mask",
        "a floating point dtype",
        EIGHT.float(),
        "attention_mask has dtype torch.float32",
        "integer or bool",
    ),
    bad_rows(
        "attention_mask",
        "a value other than 0 and 1",
        [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 2, 0, 0, 0, 0, 0]],
        "attention_mask is 2 at row 1, token 2",
        "1 (token) or 0 (pad)",
    ),
    bad_rows(
        "attention_mask",
        "a value other than 0 and 1, beside document_ids",
        EIGHT * -1,
        "attention_mask is -1 at row 0, token 0",
        "1 (token) or 0 (pad)",
        document_ids=EIGHT,
    ),
    bad_rows(
        "attention_mask",
        "left padding",
        [ONES, [0, 0, 1, 1, 1, 1, 1, 1]],
        "attention_mask has a token at row 1, index 2 after a pad",
        "only right padding",
    ),
    bad_rows(
        "attention_mask",
        "a token after a pad",
        [[1, 1, 1, 0, 0, 1, 0, 0], ONES],
        "attention_mask has a token at row 0, index 5 after a pad",
        "use document_ids",
    ),
    bad_input(
        "attention_mask",
        "given beside tokens",
        "window",
        lambda s: {"attention_mask": EIGHT, "tokens": lay_out_tokens(8, s.x.device)},
        "attention_mask came besides tokens",
        "goes without",
    ),
]

DOCUMENT_CASES = [
    bad_rows(
        "document_ids",
        "another shape than [batch, tokens]",
        EIGHT[0],
        "document_ids has shape (8,)",
        "[batch, tokens] = [2, 8]",
    ),
    bad_rows(
        "document_ids",
        "a floating point dtype",
        EIGHT.double(),
        "document_ids has dtype torch.float64",
        "integer or bool",
    ),
    bad_rows(
        "document_ids",
        "a negative id",
        [ONES, [1, 1, -1, -1, 0, 0, 0, 0]],
        "document_ids is -1 at row 1, token 2",
        "ids are positive, 0 is a pad",
    ),
    bad_rows(
        "document_ids",
        "ids that decrease along a row",
        [[3, 3, 0, 0, 2, 2, 2, 2], ONES],
        "document_ids falls from 3 to 2 at row 0, token 4",
        "must not decrease",
    ),
    bad_rows(
        "document_ids",
        "a document that goes on after a pad",
        [ONES, [1, 1, 0, 0, 1, 1, 1, 1]],
        "document_ids has document 1 again at row 1, token 4 after a pad",
        "one run of tokens",
    ),
    bad_rows(
        "document_ids",
        "a start that is not aligned to the groups",
        [ONES, [1, 1, 1, 2, 2, 2, 2, 2]],
        "document_ids starts document 2 at row 1, token 3",
        "a multiple of 2",
    ),
    bad_rows(
        "document_ids",
        "a row that begins with a pad",
        [ONES, [0, 0, 1, 1, 1, 1, 1, 1]],
        "document_ids begins row 1 with a pad",
        "begins with a document",
    ),
    bad_rows(
        "attention_mask and document_ids",
        "a token in one that is a pad in the other",
        [ONES, [1, 1, 1, 0, 0, 0, 0, 0]],
        "attention_mask and document_ids disagree at row 1, token 3",
        "mask 0, document 2",
        "a pad is 0 in both",
        document_ids=[[1] * 8, [1, 1, 2, 2, 0, 0, 0, 0]],
    ),
    bad_input(
        "document_ids",
        "given beside tokens",
        "window",
        lambda s: {"document_ids": EIGHT, "tokens": lay_out_tokens(8, s.x.device)},
        "document_ids came besides tokens",
        "goes without",
    ),
]

INPUT_IDS_CASES = [
    bad_input(
        "input_ids",
        "no tensor",
        "model",
        lambda s: {"input_ids": [[1, 2]]},
        "input_ids is a list",
        "integer tensor [batch, tokens]",
    ),
    bad_input(
        "input_ids",
        "another number of dimensions",
        "model",
        lambda s: {"input_ids": s.ids[0]},
        "input_ids has shape (8,)",
        "[batch, tokens]",
    ),
    bad_input(
        "input_ids",
        "a dtype other than int64 and int32",
        "model",
        lambda s: {"input_ids": s.ids.float()},
        "input_ids has shape (2, 8) and dtype torch.float32",
        "int64 or int32",
    ),
    bad_input(
        "input_ids",
        "no tokens or no rows",
        "model",
        lambda s: {"input_ids": s.ids[:, :0]},
        "input_ids has shape (2, 0)",
        "at least one row and 1 to max_position_embeddings 32 tokens",
    ),
    bad_input(
        "input_ids",
        "more tokens than max_position_embeddings",
        "model",
        lambda s: {"input_ids": s.ids.repeat(1, 5)},
        "input_ids has shape (2, 40)",
        "1 to max_position_embeddings 32 tokens",
    ),
    bad_input(
        "input_ids",
        "an id outside of the vocabulary",
        "model",
        lambda s: {"input_ids": torch.tensor([[3, 256], [0, -1]])},
        "input_ids holds -1 to 256",
        "0 and vocab_size - 1 = 255",
    ),
]

CACHE_CASES = [
    bad_input(
        "cache",
        "not a CSA2Cache",
        "both",
        lambda s: {"cache": s.state},
        "cache is a CSA2State",
        "must be a CSA2Cache",
    ),
    bad_cache("made for another config", "of another config", "cache was made for another config", "this model's cfg"),
    bad_cache("of another batch size", "of 3 rows", "cache has batch_size 3", "this call has 2 rows"),
    bad_cache("on another device", "elsewhere", "cache is on meta", "this call is on cpu"),
    bad_cache(
        "of another dtype than the model's",
        "in bfloat16",
        "cache has dtype torch.bfloat16",
        "the model's is torch.float32",
        target="model",
    ),
    bad_cache(
        "without room for these tokens",
        "of 12 tokens",
        "cache has room for max_seq_len = 16 tokens a row",
        "it holds up to 12 and this step brings 8 more",
    ),
    bad_cache("given to a layer of the dense layout", "good", "layout is dense", "use auto", target="dense"),
    bad_cache(
        "in a step of another number of tokens",
        "in a step of 5",
        "cache is in a step of 5 tokens and layer 2 got 8",
        "call cache.advance before the next step",
        target="full, ratio 2",
    ),
    bad_cache(
        "in a step of more than max_truncate tokens, in which the layer has run",
        "in a long step",
        "cache: layer 2 has run in this step, whose 8 tokens have overwritten",
        "call cache.advance once a step, or cache.reset",
        target="full, ratio 2",
    ),
    bad_input(
        "tokens",
        "given beside a CSA2Cache",
        "window",
        lambda s: {"cache": s.caches["good"], "tokens": lay_out_tokens(8, s.x.device)},
        "tokens came besides a CSA2Cache",
        "which gives its own",
    ),
    bad_input(
        "document_ids",
        "given beside a cache",
        "both",
        lambda s: {"cache": s.caches["good"], "document_ids": EIGHT},
        "document_ids came with a cache",
        "pass attention_mask",
    ),
]

CACHE_CALL_CASES = [
    bad_call(
        "batch_size of a cache",
        "less than 1, or no integer",
        lambda s: CSA2Cache(CONFIG, 0, 16),
        "batch_size is 0",
        "an integer of at least 1",
    ),
    bad_call(
        "max_seq_len of a cache",
        "more than max_position_embeddings, less than 1, or no integer",
        lambda s: CSA2Cache(CONFIG, 2, 33),
        "max_seq_len is 33",
        "an integer from 1 to 32",
    ),
    bad_call(
        "max_truncate of a cache",
        "less than 0, or no integer",
        lambda s: CSA2Cache(CONFIG, 2, 16, max_truncate=-1),
        "max_truncate is -1",
        "an integer of at least 0",
    ),
    bad_call(
        "dtype of a cache",
        "not floating point",
        lambda s: CSA2Cache(CONFIG, 2, 16, torch.int64),
        "dtype is torch.int64",
        "torch.bfloat16, torch.float32",
    ),
    bad_call(
        "num_tokens of cache.advance",
        "before any step",
        lambda s: s.caches["good"].advance(1),
        "advance: no step has been run",
    ),
    bad_call(
        "num_tokens of cache.advance",
        "more than the step had, less than 0, or no integer",
        lambda s: s.caches["of 12 tokens"].advance(13),
        "num_tokens is 13",
        "an integer from 0 to 12",
    ),
    bad_call(
        "num_tokens of cache.advance",
        "a tensor that is not one integer a row",
        lambda s: s.caches["of 12 tokens"].advance(torch.ones(2)),
        "num_tokens has shape (2,) and dtype torch.float32",
        "an integer tensor [2], one a row",
    ),
    bad_call(
        "num_tokens of cache.advance",
        "leaving out more than max_truncate of a long step",
        lambda s: s.caches["of 12 tokens"].advance(3),
        "num_tokens leaves out 9 of a step's 12 tokens",
        "at most max_truncate = 8",
    ),
    bad_call(
        "num_tokens of cache.truncate",
        "less than 0, or no integer",
        lambda s: s.caches["of 12 tokens"].truncate(-1),
        "num_tokens is -1",
        "an integer of at least 0",
    ),
    bad_call(
        "num_tokens of cache.truncate",
        "a tensor that is not one integer a row",
        lambda s: s.caches["of 12 tokens"].truncate(torch.ones(3, dtype=torch.int64)),
        "num_tokens has shape (3,) and dtype torch.int64",
        "an integer tensor [2], one a row",
    ),
    bad_call(
        "num_tokens of cache.truncate",
        "more than a row holds",
        lambda s: s.caches["of 12 tokens"].truncate(torch.tensor([0, 13])),
        "rows hold [12, 12] tokens",
        "0 to those are allowed",
    ),
    bad_call(
        "num_tokens of cache.truncate",
        "leaving a row more than max_truncate behind the farthest it has reached",
        lambda s: s.caches["of 12 tokens"].truncate(9),
        "num_tokens is 9, which would leave a row 9 tokens behind",
        "at most max_truncate = 8",
    ),
    bad_call(
        "rows of cache.reorder",
        "a tensor that is not one integer a row",
        lambda s: s.caches["of 12 tokens"].reorder(torch.tensor([True, False])),
        "rows has shape (2,) and dtype torch.bool",
        "an integer tensor [2], one a row",
    ),
    bad_call(
        "rows of cache.reorder",
        "a row that the cache does not have",
        lambda s: s.caches["of 12 tokens"].reorder(torch.tensor([0, 2])),
        "rows is [0, 2]",
        "row numbers from 0 to 1",
    ),
]

GENERATION_CASES = [
    bad_call(
        "temperature of generate",
        "less than 0, infinite or NaN",
        lambda s: generate(s.modules["model"], s.ids, 4, temperature=-0.5),
        "temperature is -0.5",
        "a finite number of at least 0",
    ),
    bad_call(
        "top_k of generate",
        "less than 1, or no integer",
        lambda s: generate(s.modules["model"], s.ids, 4, top_k=0),
        "top_k is 0",
        "an integer of at least 1",
    ),
    bad_call(
        "top_p of generate",
        "0 or less, more than 1, or NaN",
        lambda s: generate(s.modules["model"], s.ids, 4, top_p=1.5),
        "top_p is 1.5",
        "above 0 and at most 1",
    ),
    bad_call(
        "stop of generate",
        "text, or a token outside of the vocabulary",
        lambda s: generate(s.modules["model"], s.ids, 4, stop="."),
        "stop is '.'",
        "bytes, or integers within 0 and 255",
    ),
    bad_call(
        "seed of generate",
        "less than 0, 2^64 or more, or no integer",
        lambda s: generate(s.modules["model"], s.ids, 4, seed=-1),
        "seed is -1",
        "None or an integer within 0 and 2^64 - 1",
    ),
    bad_call(
        "max_new_tokens of generate",
        "less than 1, or no integer",
        lambda s: generate(s.modules["model"], s.ids, 0),
        "max_new_tokens is 0",
        "an integer of at least 1",
    ),
    bad_call(
        "chunk_size of generate",
        "less than 1, or no integer",
        lambda s: generate(s.modules["model"], s.ids, 4, chunk_size=0),
        "chunk_size is 0",
        "an integer of at least 1",
    ),
    bad_call(
        "attention_mask of generate",
        "a row without a token",
        lambda s: generate(s.modules["model"], s.ids, 4, attention_mask=torch.tensor([ONES, [0] * 8])),
        "attention_mask has a row without a token",
        "every row of the prompt needs one",
    ),
    bad_call(
        "cache of generate",
        "without room for the prompt and the new tokens",
        lambda s: generate(s.modules["model"], s.ids, 10, cache=s.caches["good"]),
        "cache has room for max_seq_len = 16 tokens a row",
        "it holds up to 0, and prompt and new tokens need 17 more",
    ),
    bad_call(
        "num_tokens of DecodeStep",
        "less than 1, or more than the cache's max_truncate",
        lambda s: DecodeStep(s.modules["model"], s.caches["good"], num_tokens=9),
        "num_tokens is 9",
        "1 to the cache's max_truncate = 8 are allowed",
    ),
    bad_call(
        "input_ids of DecodeStep",
        "another shape than [batch, num_tokens]",
        lambda s: DecodeStep(s.modules["model"], s.caches["good"])(s.ids),
        "input_ids has shape (2, 8)",
        "it must be [2, 1]",
    ),
]

OTHER_CASES = [
    Case(
        "layer.layout",
        "dense or slots in a call that needs gradients",
        CSA2InputError,
        None,
        lambda s: s.modules["dense"](torch.randn(1, 8, CONFIG.hidden_size, requires_grad=True), CSA2State()),
        ("layout is dense, which has no gradient", "set the layer's layout to auto or plain", "torch.no_grad()"),
    ),
    Case(
        "layer.layout",
        "an unknown layout",
        ValueError,
        None,
        lambda s: setattr(s.modules["full"], "layout", "sparse"),
        ("layout is 'sparse'", "auto, dense, slots, plain"),
    ),
    Case(
        "layer_idx",
        "a layer that the model does not have",
        ConfigError,
        None,
        lambda s: CSA2Attention(CONFIG, 9),
        ("layer is 9", "an integer from 0 to 8"),
    ),
    bad_config(
        "head_dim",
        "not a multiple of the quantization group",
        {"head_dim": 48},
        "head_dim is 48",
        "a multiple of 32",
    ),
    bad_config(
        "o_groups",
        "not a divisor of the heads",
        {"o_groups": 3},
        "o_groups is 3",
        "a divisor of num_attention_heads = 4",
    ),
    bad_config(
        "compress_ratios",
        "not one ratio a layer",
        {"num_hidden_layers": 8},
        "compress_ratios is (0, 0, 2, 2, 2, 1, 1, 1, 1)",
        "one ratio a layer, num_hidden_layers = 8",
    ),
    bad_config(
        "kv_source_layer_ids",
        "no source for a layer with compressed KV",
        {"kv_source_layer_ids": (2,), "index_source_layer_ids": (2, 7), "candidate_source_layer_id": -1},
        "kv_source_layer_ids is (2,)",
        "one source of ratio 1 at or before layer 5",
    ),
    bad_config(
        "candidate_topk_blocks",
        "blocks that hold fewer positions than a query selects",
        {"candidate_topk_blocks": 7},
        "candidate_topk_blocks is 7",
        "index_topk = 32",
        "make 28",
    ),
    bad_config(
        "candidate_source_layer_id",
        "a source of another compress ratio than a later index source",
        {"candidate_source_layer_id": 2},
        "candidate_source_layer_id is 2",
        "its own is 2, that of layer 5 is 1",
    ),
    Case(
        "passes",
        "an unknown pass",
        ValueError,
        None,
        lambda s: compile_model(s.modules["model"], passes=["inline", "fuse"]),
        ("passes names 'fuse'", "allowed are all, none, ", "inline"),
    ),
    Case(
        "backend",
        "another than Inductor",
        ValueError,
        None,
        lambda s: compile_model(s.modules["model"], backend="eager"),
        ("backend is 'eager'", "must be 'inductor'"),
    ),
    Case(
        "options",
        "a pass in the pass manager's place",
        ValueError,
        None,
        lambda s: compile_model(s.modules["full"], options={"post_grad_custom_pre_pass": None}),
        ("options has post_grad_custom_pre_pass", "leave it out"),
    ),
    Case(
        "regional",
        "True for a single layer",
        ValueError,
        None,
        lambda s: compile_model(s.modules["full"], regional=True),
        ("regional=True", "needs a CSA2ForCausalLM", "model is a CSA2Attention"),
    ),
    Case(
        "format_name",
        "an unknown quantization format",
        ValueError,
        None,
        lambda s: row_bytes(64, "int8"),
        ("format_name is 'int8'", "'fp8', 'nvfp4', 'mxfp4'"),
    ),
    Case(
        "x of a quantization",
        "a last dimension of no whole groups",
        ValueError,
        None,
        lambda s: quantize_dequantize_body(torch.ones(2, 40), "nvfp4"),
        ("x.shape[-1] is 40", "nvfp4", "multiples of 16"),
    ),
    Case(
        "x of a quantization",
        "a dtype that is not floating point",
        ValueError,
        None,
        lambda s: quantize_dequantize_body(torch.ones(2, 32, dtype=torch.int32), "fp8"),
        ("x has dtype torch.int32", "torch.bfloat16, torch.float32"),
    ),
    Case(
        "shared_memory",
        "less than the smallest attention tile takes",
        ValueError,
        None,
        lambda s: forward_tiles(512, 4, 64 * 1024, query_rows=64),
        ("head_dim 512 with 4 byte elements needs 101376 bytes", "the device allows 65536"),
    ),
    Case(
        "path of a checkpoint",
        "a file without a key that the layer needs",
        CheckpointError,
        None,
        lambda s: load_attention(s.modules["full"], s.short_checkpoint()),
        ("short.safetensors", "keys of layer 5 are missing: attn_sink", "layers.5.attn.attn_sink"),
    ),
    bad_call(
        "state of save_state",
        "not one that this layer of the config returns",
        lambda s: save_state(s.state, s.folder / "state", CONFIG, 4),
        "state holds compress ratios [1]",
        "after layer 4 of this config [2] is allowed",
    ),
    bad_call(
        "layer_idx of save_state",
        "a layer that the config does not have, or no integer",
        lambda s: save_state(s.state, s.folder / "state", CONFIG, 9),
        "layer_idx is 9",
        "0 to 8",
    ),
    Case(
        "path of load_state",
        "a file that is damaged, cut off, or no saved state",
        CheckpointError,
        None,
        lambda s: load_state(s.damaged_state()),
        ("damaged is damaged", "SHA-256"),
    ),
]


def bad_setting(names: str, came: str, value: Any, allowed: str, **others: Any) -> Case:
    """A bad value of a setting of a training run; the first of `names` stands for all."""
    name = names.split("`")[0].split(",")[0]
    settings = {"steps": 1, **others, name: value}
    words = (f"{name}: it is {value!r}", allowed)
    return Case(f"{names} of TrainConfig", came, TrainConfigError, None, lambda s: TrainConfig(**settings), words)


def bad_run(argument: str, came: str, error: type[ValueError], *words: str, text: bytes, **settings: Any) -> Case:
    def make(s: Setup) -> Any:
        file = s.folder / "text"
        file.write_bytes(text)
        cfg, model = TrainConfig(steps=1, **settings), s.modules["model"]
        assert isinstance(model, CSA2ForCausalLM)
        return Trainer(model, read_documents([file]), cfg, s.folder)

    return Case(argument, came, error, None, make, words)


def window_model() -> CSA2ForCausalLM:
    nothing: dict[str, Any] = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "candidate_source_layer_id": -1}
    return CSA2ForCausalLM(replace(CONFIG, num_hidden_layers=1, compress_ratios=(0,), **nothing))


def evaluated(**settings: Any) -> Callable[[Setup], Any]:
    return lambda s: evaluate(s.modules["model"], [b"some text"], **{"seq_len": 8, **settings})


ZERO_OR_MORE, WHOLE = "a finite number of at least 0", "an integer of at least"
TRAINING_CASES = [
    bad_setting("steps, batch_size, distill_every", "less than 1, or no integer", 0, f"{WHOLE} 1"),
    bad_setting("seq_len", "less than 2, or no integer", 1, f"{WHOLE} 2"),
    bad_run(
        "seq_len of TrainConfig",
        "more than the model's max_position_embeddings",
        TrainConfigError,
        "seq_len: it is 33; the model takes up to 32 tokens",
        text=b"abc",
        seq_len=33,
    ),
    bad_setting("warmup, val_every, save_every, seed, distill_warmup", "less than 0, or no integer", -1, f"{WHOLE} 0"),
    bad_setting("lr, distill_weight", "0 or less, infinite or NaN", 0, "a finite number above 0"),
    bad_setting("min_lr_ratio", "less than 0, more than 1, or NaN", 1.5, "from 0 to 1"),
    bad_setting("weight_decay, grad_clip", "less than 0, infinite or NaN", -1.0, ZERO_OR_MORE),
    bad_setting("val_fraction", "less than 0, 1 or more, or NaN", 1.0, "from 0 to below 1"),
    bad_setting("dtype", "another than these", "float16", "float32 or bfloat16"),
    bad_setting("distill, compile, checkpointing", "no bool", 1, "True or False"),
    Case(
        "distill of TrainConfig",
        "True for a model without a layer that selects",
        TrainConfigError,
        None,
        lambda s: Trainer(window_model(), [b"abc"], TrainConfig(steps=1, seq_len=8, distill=True), s.folder),
        ("distill: it is True", "must be False"),
    ),
    bad_run(
        "text of a training run",
        "a directory, or a file that is empty or cannot be read",
        TrainDataError,
        "text: ",
        "is empty; at least one byte is needed",
        text=b"",
    ),
    bad_run(
        "text of a training run",
        "no document of two bytes",
        TrainDataError,
        "text: no document has two bytes",
        text=b"a\fb",
        seq_len=8,
    ),
    bad_run(
        "val_fraction of a training run",
        "more than 0, and text of a single window",
        TrainDataError,
        "val_fraction: 0.5 of one window",
        "more text, a smaller seq_len, or 0",
        text=b"abc",
        seq_len=8,
        val_fraction=0.5,
    ),
    Case(
        "seq_len of evaluate",
        "less than 2, more than max_position_embeddings, or no integer",
        CSA2InputError,
        None,
        evaluated(seq_len=33),
        ("seq_len is 33", "within 2 and 32"),
    ),
    Case(
        "batch_size of evaluate",
        "less than 1, or no integer",
        CSA2InputError,
        None,
        evaluated(batch_size=0),
        ("batch_size is 0", "within 1 and "),
    ),
    Case(
        "attends of evaluate",
        "nothing, or another name",
        CSA2InputError,
        None,
        evaluated(attends=["all"]),
        ("attends is ['all']", "sparse, dense, window"),
    ),
    Case(
        "attends of evaluate",
        "a string",
        CSA2InputError,
        None,
        evaluated(attends="dense"),
        ("attends is the string 'dense'",),
    ),
    Case(
        "documents of evaluate, of Trainer",
        "a string, or objects that are not bytes",
        TrainDataError,
        None,
        lambda s: evaluate(s.modules["model"], ["text"], 8),  # type: ignore[list-item]
        ("documents: they hold an object of type str",),
    ),
]


def distilled(setup: Setup, calls: int = 1, **arguments: Any) -> None:
    losses = DistillationLosses()
    for _ in range(calls):
        setup.modules["model"](setup.ids, run_block=losses.run_block, **arguments)


def distilled_twice(setup: Setup) -> None:
    with torch.no_grad():
        distilled(setup, calls=2)


def loss_of(module: str, state: Callable[[Setup], CSA2State]) -> Callable[[Setup], Any]:
    def make(s: Setup) -> Any:
        with torch.no_grad():
            return distillation_loss(s.modules[module], s.x, state(s), lay_out_tokens(8, s.x.device))

    return make


def save_nothing(setup: Setup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "graphs_compiled", lambda: 0)
        save_compile_cache(setup.folder / "nothing.bin")


def bad_cache_file(came: str, make: Callable[[Setup], Path], *words: str) -> Case:
    argument = "path of load_compile_cache"
    return Case(argument, came, CompileCacheError, None, lambda s: load_compile_cache(make(s)), words)


DISTILLATION_CASES = [
    bad_call(
        "model of enable_distillation",
        "no module",
        lambda s: enable_distillation(3),  # type: ignore[arg-type]
        "model is a int",
        "an nn.Module",
    ),
    bad_call(
        "enabled of enable_distillation",
        "no bool",
        lambda s: enable_distillation(s.modules["model"], 1),  # type: ignore[arg-type]
        "enabled is 1",
        "True or False",
    ),
    bad_call(
        "stage of DistillationLosses",
        "another name",
        lambda s: DistillationLosses("warm"),  # type: ignore[arg-type]
        "stage is 'warm'",
        "dense, sparse",
    ),
    bad_call(
        "chunk_size of DistillationLosses",
        "less than 1, or no integer",
        lambda s: DistillationLosses(chunk_size=0),
        "chunk_size is 0",
        "a positive integer",
    ),
    bad_call(
        "inner of DistillationLosses",
        "not a function",
        lambda s: DistillationLosses(inner=3),  # type: ignore[arg-type]
        "inner is 3",
        "a function that runs a block, or None",
    ),
    bad_call(
        "run_block of DistillationLosses",
        "given to a second call",
        distilled_twice,
        "run_block has the loss of layer 2 from an earlier call",
        "make a new DistillationLosses for each",
    ),
    bad_call(
        "run_block of DistillationLosses",
        "given to a call of frozen indexers that needs gradients",
        distilled,
        "layer 2's indexer is frozen",
        "enable_distillation",
        "torch.no_grad()",
    ),
    bad_call(
        "run_block of DistillationLosses",
        "given beside a cache",
        lambda s: distilled(s, cache=CSA2Cache(CONFIG, 2, 16)),
        "cache was given",
        "run without one",
    ),
    bad_call(
        "run_block of DistillationLosses",
        "given to no call, or to that of a model that does not select, when total is asked for",
        lambda s: DistillationLosses().total(),
        "no index source ran with this object's run_block",
        "give it to the model's call",
    ),
    bad_call(
        "layer of distillation_loss",
        "one that does not select",
        loss_of("reuse, ratio 2", lambda s: s.state_2),
        "layer 3 is a reuse layer",
        "take a full or reindex layer",
    ),
    bad_call(
        "layer of distillation_loss",
        "no CSA2Attention",
        loss_of("model", lambda s: s.state_2),
        "layer is a CSA2ForCausalLM",
        "must be a CSA2Attention",
    ),
    bad_call(
        "state of distillation_loss",
        "no CSA2State",
        loss_of("full, ratio 2", lambda s: None),  # type: ignore[arg-type, return-value]
        "state is a NoneType",
        "must be a CSA2State",
    ),
    bad_call(
        "state of distillation_loss",
        "without a publication of the layer's compress ratio",
        loss_of("full, ratio 2", lambda s: s.state),
        "state holds no publication of compress ratio 2",
        "the one that layer 2 returned",
    ),
]

COMPILE_CACHE_CASES = [
    Case(
        "path of save_compile_cache",
        "a call where nothing was compiled, or with graph caches off",
        CompileCacheError,
        None,
        save_nothing,
        ("nothing was compiled in this process", "graph caches off"),
    ),
    Case(
        "device of save_compile_cache",
        "a name that torch does not know, another device, or cuda where torch finds no GPU",
        CompileCacheError,
        None,
        lambda s: save_compile_cache(s.folder / "graphs.bin", "meta"),
        ("device is 'meta'", "allowed are cpu, and cuda"),
    ),
    bad_cache_file(
        "a file that cannot be read",
        lambda s: s.folder / "none.bin",
        "none.bin cannot be read",
    ),
    bad_cache_file(
        "a file that is damaged, cut off, of another format, or no compile cache",
        lambda s: s.short_checkpoint(),
        "short.safetensors is no compile cache",
        "does not begin with 'CSA2 compile cache '",
    ),
    bad_cache_file(
        "a file for a device that is not here, or for a CPU with instructions that this one lacks",
        lambda s: s.compile_cache(device="xpu"),
        "graphs.bin is for device 'xpu'",
        "allowed are 'cpu' and 'cuda'",
    ),
    bad_cache_file(
        "a file made with another version, machine, GPU, CPU capability, C++ command, or other sources",
        lambda s: s.compile_cache(torch="9.9"),
        "graphs.bin was made with torch 9.9",
        f"here it is {torch.__version__}",
    ),
    bad_cache_file(
        "a file with a library of a name that no cache has",
        lambda s: s.compile_cache(b"code", (("../code.so", 4),)),
        "graphs.bin names a library '../code.so'",
    ),
    bad_cache_file(
        "a file whose artifacts this torch cannot read",
        lambda s: s.compile_cache(b"no artifacts"),
        "graphs.bin holds artifacts that this torch cannot read",
    ),
]

INPUT_CASES = [*X_CASES, *STATE_CASES, *MASK_CASES, *DOCUMENT_CASES, *INPUT_IDS_CASES, *CACHE_CASES]
CALL_CASES = [*CACHE_CALL_CASES, *GENERATION_CASES, *OTHER_CASES, *TRAINING_CASES, *DISTILLATION_CASES]
CASES = [*INPUT_CASES, *CALL_CASES, *COMPILE_CACHE_CASES]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("errors"))


def raised_by(call: Callable[[], Any], case: Case) -> None:
    with pytest.raises(case.error) as caught:
        call()
    assert type(caught.value) is case.error
    for word in case.words:
        assert word in str(caught.value), word


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.argument}: {case.came}")
def test_bad_inputs_are_named_and_change_nothing(case: Case, setup: Setup) -> None:
    if case.target is None:
        raised_by(lambda: case.make(setup), case)
    else:
        for name in case.modules():
            arguments = case.arguments(setup, name)
            raised_by(lambda name=name, arguments=arguments: setup.modules[name](**arguments), case)
    for tensor, before in zip(setup.snapshot(), setup.before, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("case", INPUT_CASES, ids=lambda case: f"{case.argument}: {case.came}")
def test_compiled_modules_check_before_they_compile(case: Case, setup: Setup) -> None:
    for name in (*case.modules(), *(["regional model"] if "model" in case.modules() else [])):
        compiled = setup.compiled[name]
        arguments = case.arguments(setup, name.removeprefix("regional "))
        raised_by(lambda compiled=compiled, arguments=arguments: compiled(**arguments), case)
        assert compiled.compilations == 0


def test_compiled_modules_check_what_comes_by_position(setup: Setup) -> None:
    odd = EIGHT * 2
    calls: dict[CompiledModel, tuple[Any, ...]] = {
        setup.compiled["model"]: (setup.ids, None, odd),
        setup.compiled["regional model"]: (setup.ids, None, odd),
        setup.compiled["full"]: (setup.x, None, odd),
    }
    for compiled, arguments in calls.items():
        with pytest.raises(CSA2InputError, match="attention_mask is 2"):
            compiled(*arguments)
        assert compiled.compilations == 0
    with pytest.raises(CSA2InputError, match="attention_mask is 2"):
        setup.compiled["model"].run_block(setup.modules["full"], setup.x, None, odd)
    assert setup.compiled["model"].compilations == 0


def test_the_table_has_these_rows() -> None:
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    header, _, *rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    assert header == ["argument", "what came", "error", "what is allowed"]
    assert all(len(row) == 4 and all(row) for row in rows)
    assert [(row[0], row[1]) for row in rows] == [case.row for case in CASES]
    assert [row[2] for row in rows] == [case.error.__name__ for case in CASES]


def test_every_error_is_a_value_error_that_the_package_exports() -> None:
    errors = {case.error for case in CASES}
    assert all(issubclass(error, ValueError) for error in errors)
    assert {error.__name__ for error in errors} - {"ValueError"} <= set(csa2_compiled.__all__)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_is_let_through_untouched(setup: Setup, value: float) -> None:
    x = setup.x.clone()
    x[1, 3] = value
    given = x.clone()
    state = CSA2State()
    for name in ("window", "full", "reindex"):
        with torch.no_grad():
            output = setup.modules[name](x, state)
        state = output.state
        assert output.hidden_states[0].isfinite().all()
        assert not output.hidden_states[1, 3].isfinite().any()
    assert torch.equal(x.nan_to_num(7.0), given.nan_to_num(7.0))
