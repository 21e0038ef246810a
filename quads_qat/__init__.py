"""NVFP4 quantization-aware training and residual-compensated rollouts for RL on mixture-of-experts models."""

from quads_qat import ops, reference
from quads_qat.autograd import fake_quantize_ste
from quads_qat.buckets import bucketed, unbucketed
from quads_qat.compare import diff
from quads_qat.config import Backend, Dialect, Mode, Recipe, ResidualConfig, Schedule, Scope, WeightScale
from quads_qat.contract import Contract, contract_of
from quads_qat.convert import convert, full_precision, revert
from quads_qat.coverage import coverage
from quads_qat.diagnose import Diagnosis, GapLogger, GapStats, diagnose, gap_stats
from quads_qat.engine_limits import EngineWarning
from quads_qat.export import export_checkpoint
from quads_qat.first_step import FirstStepReport, GapLimits, check_first_step
from quads_qat.integrations.registration import register_with_transformers
from quads_qat.integrations.transformers import patch_transformers
from quads_qat.load import load_model, load_rollout
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantize import quantize_checkpoint
from quads_qat.received import weight_digests
from quads_qat.recode import convert_dialect, dequantize_checkpoint
from quads_qat.schedule import StepReport, accumulate, step
from quads_qat.state import calibrate, load_quant_state_dict, observe_activations, quant_state_dict
from quads_qat.tensor_parallel import check_tp
from quads_qat.verify import VerificationError, verify, verify_checkpoint
from quads_qat.weight_stream import export_metadata, export_weights
from quads_qat.weight_sync import SyncReport, update_weights

register_with_transformers()

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Contract",
    "Diagnosis",
    "Dialect",
    "EngineWarning",
    "FirstStepReport",
    "GapLimits",
    "GapLogger",
    "GapStats",
    "Mode",
    "NVFP4Tensor",
    "Recipe",
    "ResidualConfig",
    "Schedule",
    "Scope",
    "StepReport",
    "SyncReport",
    "VerificationError",
    "WeightScale",
    "accumulate",
    "bucketed",
    "calibrate",
    "check_first_step",
    "check_tp",
    "contract_of",
    "convert",
    "convert_dialect",
    "coverage",
    "dequantize_checkpoint",
    "diagnose",
    "diff",
    "export_checkpoint",
    "export_metadata",
    "export_weights",
    "fake_quantize_ste",
    "full_precision",
    "gap_stats",
    "load_model",
    "load_quant_state_dict",
    "load_rollout",
    "observe_activations",
    "ops",
    "patch_transformers",
    "quant_state_dict",
    "quantize_checkpoint",
    "reference",
    "revert",
    "step",
    "unbucketed",
    "update_weights",
    "verify",
    "verify_checkpoint",
    "weight_digests",
]
