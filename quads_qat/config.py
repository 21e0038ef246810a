"""Named choices: which arithmetic (``Recipe``), which file layout (``Dialect``), which implementation (``Backend``)."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import Enum

import torch


class _Choice(str, Enum):
    """A string enum that accepts any spelling of its values and names the valid ones when it refuses."""

    @classmethod
    def _missing_(cls, value: object) -> _Choice | None:
        if isinstance(value, str):
            wanted = value.lower().replace("_", "-")
            for member in cls:
                if member.value.replace("_", "-") == wanted:
                    return member
        raise ValueError(f"{cls.__name__}: unknown value {value!r}; choose one of {', '.join(m.value for m in cls)}")

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return repr(self.value)  # configs print as they are written: ResidualConfig(scope='token')


def require_kind(who: str, argument: str, value: object, kind: type) -> None:
    """``value`` is None or a ``kind``: a dict that looks like one would fail later, without a name."""
    if value is None or isinstance(value, kind):
        return
    given = ", ".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, dict) else "..."
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    raise TypeError(
        f"{who}: {argument} must be {article} {kind.__name__} or None, got {type(value).__name__}; pass "
        f"{kind.__name__}({given})"
    )


def require_integer(who: str, argument: str, value: object, least: int) -> None:
    """``value`` is an integer (of Python or NumPy, no bool) and at least ``least``; 2.5 would be cut in silence."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{who}: {argument} must be an integer, got {value!r}")
    if operator.index(value) < least:  # pyright: ignore[reportArgumentType]
        raise ValueError(f"{who}: {argument} must be an integer >= {least}, got {value!r}")


class Recipe(_Choice):
    """Which arithmetic turns a tensor into codes and scales: rounding order and zero rules, never the format."""

    #: Powers of two as per-tensor scale; every step is one correct rounding of an exact number. The default.
    ALIGNED = "aligned"
    #: Model-Optimizer on a GPU (divisions by Python numbers are multiplications by rounded reciprocals there).
    MODELOPT = "modelopt"
    #: Model-Optimizer on a CPU (IEEE divisions).
    MODELOPT_IEEE = "modelopt-ieee"
    #: Model-Optimizer's static path (calibrated block amaxes), on a GPU.
    MODELOPT_STATIC = "modelopt-static"
    #: The static path on a CPU.
    MODELOPT_STATIC_IEEE = "modelopt-static-ieee"
    #: llm-compressor / compressed-tensors: global scale and block amax / 6 rounded in the weight's dtype.
    LLM_COMPRESSOR = "llm-compressor"
    #: TransformerEngine's reference, FlashInfer's exact mode.
    TRANSFORMER_ENGINE = "transformer-engine"


class Dialect(_Choice):
    """How a checkpoint names its tensors and which direction its per-tensor scale has."""

    #: ``weight``, ``weight_scale``, ``weight_scale_2`` (multiplies), ``input_scale`` (multiplies).
    MODELOPT = "modelopt"
    #: ``weight_packed``, ``weight_scale``, ``weight_global_scale`` (divides), ``input_global_scale`` (divides).
    COMPRESSED_TENSORS = "compressed-tensors"


class Backend(_Choice):
    """Which implementation computes; all give the same bits."""

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"


class Mode(_Choice):
    """What a converted module does with its weights and activations."""

    #: Trainer: fake-quantized weights, activations untouched.
    W4A16 = "w4a16"
    #: Ablation: fake-quantized weights and activations in the trainer.
    W4A4 = "w4a4"
    #: Rollout: packed weights, quantized activations plus a second quantization of their residual.
    W4A4_RESIDUAL = "w4a4_residual"


class Scope(_Choice):
    """Which linears and experts are quantized."""

    ALL = "all"
    MLP = "mlp"
    EXPERTS = "experts"


class ActivationScale(_Choice):
    """Over what the per-tensor scale of an activation is taken."""

    PER_TOKEN = "per_token"
    PER_TENSOR = "per_tensor"
    STATIC = "static"


class ResidualScope(_Choice):
    """Over what the residual's channels are ranked."""

    #: One mask of length K for the rows of one GEMM call. Not batch-invariant.
    BATCH = "batch"
    #: One mask for each row.
    TOKEN = "token"
    #: The top n of every 16 channels of each row.
    BLOCK = "block"
    #: A fixed mask of length K.
    STATIC = "static"


class ExpertMask(_Choice):
    """On which rows the residual's channels of a fused expert stack are ranked (scopes ``batch`` and ``static``)."""

    #: The rows that this expert's GEMM sees: experts differ.
    PER_EXPERT = "per_expert"
    #: The hidden states before they are sent to experts: one mask for all of them. What lies between an expert's two
    #: projections exists only inside it; there ``batch`` ranks its own rows, and ``static`` the rows of all experts.
    BEFORE_DISPATCH = "before_dispatch"


class ResidualNorm(_Choice):
    """How the residuals of a channel (over rows) or of a block of 16 (over channels) become one score."""

    L2 = "l2"
    L1 = "l1"
    MAX = "max"


class WeightScale(_Choice):
    """What a trainer makes the per-tensor scales of its weights from."""

    #: The amax of the weights as they are, anew in every forward.
    DYNAMIC = "dynamic"
    #: The amax at the first ``step`` that quantizes. Weights that outgrow it saturate; the same scale is exported.
    FROZEN = "frozen"
    #: A moving average of the amaxes at each ``step``. Saturates and exports likewise.
    EMA = "ema"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How fake quantization changes over a training run; ``quads_qat.step`` moves it on.

    Held scales (``frozen``, ``ema``) are in the packed tensors that ``export_weights`` yields. Masters alone do not
    tell them: sync rollouts with packed tensors then.

    Attributes:
        start_step: calls of ``step`` before weights are fake-quantized; until then the trainer is the plain model.
        weight_scale: see :class:`WeightScale`.
        decay: of the moving average, in [0, 1).

    Raises:
        TypeError, ValueError: a ``start_step`` that is no integer >= 0, a ``decay`` outside [0, 1), or an unknown name.

    >>> Schedule(weight_scale="ema").weight_scale
    'ema'
    """

    start_step: int = 0
    weight_scale: WeightScale = WeightScale.DYNAMIC
    decay: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_scale", WeightScale(self.weight_scale))
        require_integer("Schedule", "start_step", self.start_step, 0)
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"Schedule: decay must be in [0, 1), got {self.decay}; 0.9 forgets half in seven steps")


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How one weight is quantized: everything that forward, backward and export must agree on.

    Attributes:
        recipe: the arithmetic.
        export_dtype: fp32 master weights are cast to it first, as the exporter does.
        transposed: the weight is stored [E, K, N]; blocks run along K all the same.
        per_expert: a stack of experts with one scale each, [E]; otherwise one scale, [].
    """

    recipe: Recipe = Recipe.ALIGNED
    export_dtype: torch.dtype = torch.bfloat16
    transposed: bool = False
    per_expert: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationFormat:
    """How activations are quantized: the recipe, and over what their per-tensor scale is taken."""

    scale: ActivationScale = ActivationScale.PER_TOKEN
    recipe: Recipe = Recipe.ALIGNED


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Which part of the activation residual ``x - Q(x)`` is quantized a second time and added back.

    The defaults were chosen by the gap on SmolLM2-135M: half of the channels per token take 97 % off the KL that
    quantized activations add, per batch 83 %, all channels 99 % (benchmarks/RESULTS.md).

    Attributes:
        fraction: share of channels in [0, 1]; 0 is naive W4A4, 1 compensates everything.
        scope: over what channels are ranked, see :class:`ResidualScope`.
        norm: score of a channel over rows (``batch``) or of a whole block (``granularity=16``).
        granularity: 1 selects single channels, 16 whole blocks.
        expert_mask: on which rows experts rank, see :class:`ExpertMask`. Rows rank alone in scopes ``token`` and
            ``block``, where it makes no difference; experts that are linears of their own always are ``per_expert``.

    Raises:
        TypeError, ValueError: a fraction outside [0, 1], another granularity, an unknown name, ``scope="block"`` with
            whole blocks.

    >>> ResidualConfig(fraction=0.5).scope
    'token'
    """

    fraction: float = 0.5
    scope: ResidualScope = ResidualScope.TOKEN
    norm: ResidualNorm = ResidualNorm.L2
    granularity: int = 1
    expert_mask: ExpertMask = ExpertMask.PER_EXPERT

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", ResidualScope(self.scope))
        object.__setattr__(self, "expert_mask", ExpertMask(self.expert_mask))
        object.__setattr__(self, "norm", ResidualNorm(self.norm))
        if (
            isinstance(self.fraction, bool)
            or not isinstance(self.fraction, (int, float))
            or not 0.0 <= self.fraction <= 1.0
        ):
            raise ValueError(f"ResidualConfig: fraction must be between 0 and 1, got {self.fraction!r}")
        require_integer("ResidualConfig", "granularity", self.granularity, 1)
        if self.granularity not in (1, 16):
            raise ValueError(f"ResidualConfig: granularity must be 1 or 16, got {self.granularity!r}")
        if self.scope is ResidualScope.BLOCK and self.granularity == 16:
            raise ValueError("ResidualConfig: scope='block' ranks channels inside a block; use granularity=1")

    def selected(self, size: int) -> int:
        """How many of ``size`` units are selected: floor(fraction * size + 1/2)."""
        return math.floor(self.fraction * size + 0.5)
