"""CSA2, the attention of DeepSeek-V4.1, as plain PyTorch code that a compiler makes fast."""

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.cache import CSA2Cache
from csa2_compiled.checkpoint import CheckpointError, load_attention, save_attention
from csa2_compiled.compiled import CompiledModel, compile_model
from csa2_compiled.config import ConfigError, CSA2Config, LayerRole
from csa2_compiled.decode import DecodeStep
from csa2_compiled.generation import generate, prefill, sample
from csa2_compiled.masks.layout import AttentionLayout
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.tokens import CSA2InputError

__all__ = [
    "AttentionLayout",
    "CSA2Attention",
    "CSA2Cache",
    "CSA2Config",
    "CSA2ForCausalLM",
    "CSA2InputError",
    "CSA2Output",
    "CSA2State",
    "CheckpointError",
    "CompiledModel",
    "ConfigError",
    "DecodeStep",
    "LayerRole",
    "Publication",
    "compile_model",
    "generate",
    "load_attention",
    "prefill",
    "sample",
    "save_attention",
]
