"""Compiler passes over graphs that hold CSA2's named ops.

Imported as ``csa2_compiled.passes``. A file a pass; `inductor` is the one file that touches Inductor.
"""

from csa2_compiled.passes.inductor import UnknownTorchVersionError
from csa2_compiled.passes.inline import InlineNamedOps
from csa2_compiled.passes.manager import CompilerPass, PassManager, PassReport

__all__ = ["CompilerPass", "InlineNamedOps", "PassManager", "PassReport", "UnknownTorchVersionError"]
