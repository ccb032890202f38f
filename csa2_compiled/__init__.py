"""CSA2, the attention of DeepSeek-V4.1, as plain PyTorch code that a compiler makes fast."""

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.cache import CSA2Cache
from csa2_compiled.checkpoint import CheckpointError, load_attention, save_attention
from csa2_compiled.checkpointing import checkpoint_block, selective_contexts
from csa2_compiled.compile_cache import CompileCacheError, load_compile_cache, save_compile_cache
from csa2_compiled.compiled import CompiledModel, compile_model
from csa2_compiled.config import ConfigError, CSA2Config, LayerRole
from csa2_compiled.decode import DecodeStep
from csa2_compiled.distillation import DistillationLosses, distillation_loss, enable_distillation
from csa2_compiled.generation import generate, prefill, sample
from csa2_compiled.masks.layout import AttentionLayout
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.model_files import load_demo_model, load_model, save_model
from csa2_compiled.quality import QualityReport, evaluate
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.state_files import SavedState, load_state, save_state
from csa2_compiled.tokens import CSA2InputError
from csa2_compiled.train import TrainConfig, TrainConfigError, Trainer
from csa2_compiled.train_data import TrainDataError

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
    "CompileCacheError",
    "CompiledModel",
    "ConfigError",
    "DecodeStep",
    "DistillationLosses",
    "LayerRole",
    "Publication",
    "QualityReport",
    "SavedState",
    "TrainConfig",
    "TrainConfigError",
    "TrainDataError",
    "Trainer",
    "checkpoint_block",
    "compile_model",
    "distillation_loss",
    "enable_distillation",
    "evaluate",
    "generate",
    "load_attention",
    "load_compile_cache",
    "load_demo_model",
    "load_model",
    "load_state",
    "prefill",
    "sample",
    "save_attention",
    "save_compile_cache",
    "save_model",
    "save_state",
    "selective_contexts",
]
