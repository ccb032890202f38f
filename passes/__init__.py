"""Compiler passes over graphs that hold CSA2's named ops.

Imported as ``csa2_compiled.passes``. A file a pass; `inductor` is the one file that touches Inductor.
"""

from csa2_compiled.passes.attend import Attend
from csa2_compiled.passes.gemv import Gemv
from csa2_compiled.passes.index_scores import IndexScores
from csa2_compiled.passes.inductor import UnknownTorchVersionError
from csa2_compiled.passes.inline import InlineNamedOps
from csa2_compiled.passes.kv_gather import KVGather
from csa2_compiled.passes.manager import CompilerPass, PassManager, PassReport
from csa2_compiled.passes.rope_quant import RopeQuant
from csa2_compiled.passes.select_topk import SelectTopk

__all__ = [
    "Attend",
    "CompilerPass",
    "Gemv",
    "IndexScores",
    "InlineNamedOps",
    "KVGather",
    "PassManager",
    "PassReport",
    "RopeQuant",
    "SelectTopk",
    "UnknownTorchVersionError",
]
