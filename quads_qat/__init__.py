"""quads_qat: NVFP4 quantization-aware training and residual-compensated rollouts for RL on mixture-of-experts models."""

from quads_qat import ops, reference
from quads_qat.autograd import fake_quantize_ste
from quads_qat.config import Backend, Dialect, Mode, Recipe, ResidualConfig
from quads_qat.convert import (
    convert,
    coverage,
    full_precision,
    load_quant_state_dict,
    observe_activations,
    quant_state_dict,
    revert,
)
from quads_qat.qtensor import NVFP4Tensor

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Dialect",
    "Mode",
    "NVFP4Tensor",
    "Recipe",
    "ResidualConfig",
    "convert",
    "coverage",
    "fake_quantize_ste",
    "full_precision",
    "load_quant_state_dict",
    "observe_activations",
    "ops",
    "quant_state_dict",
    "reference",
    "revert",
]
