"""What the plugin of :mod:`quads_qat.integrations.vllm` puts into vLLM. Read there; this module imports vLLM.

Weights stay where and as vLLM loaded them: codes [N, K/2], block scales [N, K/16] in rows, one per-tensor scale. No
state is derived from them, so that vLLM's reload, which copies new weights into the old tensors, changes all that a
forward (or a captured CUDA graph) reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import vllm.envs as envs  # pyright: ignore[reportMissingImports]
import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels import linear as linear_kernels  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels.linear import (  # pyright: ignore[reportMissingImports]
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.fused_moe.activation import (  # pyright: ignore[reportMissingImports]
    MoEActivation,
    apply_moe_activation_supported,
)
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # pyright: ignore[reportMissingImports]
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict  # pyright: ignore[reportMissingImports]

from quads_qat import ops
from quads_qat.config import ActivationScale, Dialect, Recipe
from quads_qat.contract import KEY
from quads_qat.experts_dispatch import grouped_forward
from quads_qat.experts_layout import ExpertsLayout
from quads_qat.formats import SCALE_RANGE
from quads_qat.integrations.vllm_policy import Serving, serving
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.residual import projection

logger = init_logger("vllm.plugins.quads_qat")
PLATFORMS = (PlatformEnum.CPU, PlatformEnum.CUDA)


def _of_current_model(dialect: Dialect, *, weights_only: bool) -> Serving | None:
    """What the model that vLLM is building is to compute; said once in the log."""
    model = get_current_vllm_config().model_config
    if model is None:
        return None
    # the file first: inside a multimodal model, the hf_config of the language model is a nested one
    entry = _config_json(model.model, model.revision).get(KEY, getattr(model.hf_config, KEY, None))
    chosen = serving(entry, model.model, dialect, weights_only=weights_only)
    if chosen is None:
        logger.info_once(
            "quads_qat: a W4A16 checkpoint that records no rollout is left to vLLM's kernels; QUADS_QAT_RESIDUAL "
            "overrides this"
        )
    else:
        logger.info_once("quads_qat: NVFP4 linears and experts are computed as rollouts: %s", str(chosen))
    return chosen


@lru_cache
def _config_json(model: str, revision: str | None) -> dict[str, Any]:
    """Of a directory or a name on the hub, as vLLM found it."""
    return get_hf_file_to_dict("config.json", model, revision) or {}


def _holds_placeholders() -> bool:
    """Whether the weights that are loaded first are not those of a checkpoint."""
    return get_current_vllm_config().load_config.load_format == "dummy"


def _require_scales(recipe: Recipe, **scales: Tensor) -> None:
    """Raise ValueError where a per-tensor scale is none, or not one of ``recipe``: something was not loaded."""
    for name, scale in scales.items():
        good = torch.isfinite(scale) & (scale > 0)
        if recipe is Recipe.ALIGNED:
            good &= torch.frexp(scale).mantissa == 0.5
        if not bool(good.all()):
            kind = "powers of two" if recipe is Recipe.ALIGNED else "finite numbers > 0"
            raise ValueError(
                f"quads_qat: {name} must hold {kind}, as recipe '{recipe}' makes them, got "
                f"{scale[~good].flatten()[:3].tolist()}; a tensor was not loaded, or config.json was changed"
            )


# ------------------------------------------------------------------------------------------------------------- linears


class QuadsNvFp4LinearKernel(NvFp4LinearKernel):
    """``residual.projection`` with the parameters of a vLLM linear."""

    def __init__(self, config: NvFp4LinearLayerConfig, chosen: Serving | None = None) -> None:
        super().__init__(config)
        chosen = _of_current_model(Dialect.MODELOPT, weights_only=False) if chosen is None else chosen
        assert chosen is not None
        self.chosen, self.placeholders = chosen, _holds_placeholders()

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: what tensor cores do not multiply is decoded for them."""
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """All NVFP4 linears are alike."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is rearranged. Scales are looked at."""
        if self.placeholders:
            self.placeholders = False
            return
        _require_scales(self.chosen.recipe, weight_global_scale=layer.weight_global_scale)  # pyright: ignore
        if self.chosen.activation.scale is ActivationScale.STATIC:
            _require_scales(Recipe.MODELOPT, input_global_scale=layer.input_global_scale)  # pyright: ignore

    def weight(self, layer: Any) -> NVFP4Tensor:
        """The layer's parameters, as they are now."""
        scale = layer.weight_global_scale
        return NVFP4Tensor(layer.weight, layer.weight_scale, scale, self.chosen.recipe, scale)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """X [..., K] -> [..., N]."""
        static = self.chosen.activation.scale is ActivationScale.STATIC
        amax = layer.input_global_scale * SCALE_RANGE if static else None
        return projection(x, self.weight(layer), bias, self.chosen.activation, self.chosen.residual, amax, None)


def linear_chooser(original: Callable[..., Any], dialect: Dialect) -> Callable[..., Any]:
    """What stands for vLLM's ``init_nvfp4_linear_kernel``."""

    def init_nvfp4_linear_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
        chosen = _of_current_model(dialect, weights_only=use_a16)
        if chosen is None:
            return original(use_a16=use_a16)
        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                "quads_qat: VLLM_BATCH_INVARIANT asks for sums that do not depend on the number of rows, which ours do "
                "(in bf16's last bits); unset it or QUADS_QAT_VLLM"
            )
        return QuadsNvFp4LinearKernel(NvFp4LinearLayerConfig(), chosen)

    return init_nvfp4_linear_kernel


def decoder(original: Callable[..., Any], _: None) -> Callable[..., Any]:
    """What stands for vLLM's ``get_and_maybe_dequant_weights``: codes are decoded, not multiplied by an identity."""

    def get_and_maybe_dequant_weights(layer: Any, out_dtype: torch.dtype = torch.float32) -> Tensor:
        inner = layer
        while hasattr(inner, "base_layer"):  # of LoRA
            inner = inner.base_layer
        kernel = getattr(getattr(inner, "scheme", inner.quant_method), "kernel", None)
        if isinstance(kernel, QuadsNvFp4LinearKernel):
            return ops.dequantize(kernel.weight(inner), out_dtype)
        return original(layer, out_dtype=out_dtype)

    return get_and_maybe_dequant_weights


def register_with_vllm() -> None:
    """Through the public hook: what vLLM's own choice ends with, where no other kernel runs (on a CPU, say)."""
    for platform in PLATFORMS:
        register_linear_kernel(QuadsNvFp4LinearKernel, platform, "nvfp4")


def unregister_from_vllm() -> None:
    """Undo :func:`register_with_vllm`."""
    for platform in PLATFORMS:
        linear_kernels._POSSIBLE_NVFP4_KERNELS[platform].remove(QuadsNvFp4LinearKernel)


# ------------------------------------------------------------------------------------------------------------- experts


class QuadsNvFp4Experts(mk.FusedMoEExpertsModular):
    """The experts of a layer through the grouped GEMMs of a rollout, in the order of :func:`grouped_forward`.

    Both projections quantize and compensate their own input rows. Gate functions are vLLM's on a GPU.
    """

    chosen: Serving  # of the subclass that experts_chooser makes for a layer
    placeholders: bool
    layer: Any = None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Rows as they are, not sorted by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The residual is of what was not quantized."""
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True  # the choosers are those of NVFP4 layers

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return apply_moe_activation_supported(activation)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        """No workspaces; the output [M, K]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """The output is weighted and summed already."""
        return TopKWeightAndReduceNoOP()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Remember where the scales are. They are read at every call: a reload puts the old tensors back."""
        self.layer = layer
        if not self.placeholders:
            scales = {name: getattr(layer, name) for name in ("w13_weight_scale_2", "w2_weight_scale_2")}
            _require_scales(self.chosen.recipe, **scales)
        type(self).placeholders = False  # a reload makes a new object of the class

    def _weight(self, name: str, qdata: Tensor) -> NVFP4Tensor:
        scale = getattr(self.layer, f"{name}_weight_scale_2")
        return NVFP4Tensor(qdata, getattr(self.layer, f"{name}_weight_scale"), scale, self.chosen.recipe, scale)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write [M, K] into ``output``; slots of experts on other ranks count for nothing."""
        experts, elsewhere = w1.shape[0], expert_map is not None
        local = topk_ids.long()
        if expert_map is not None:
            local = torch.where(local < 0, -1, expert_map[local.clamp(min=0)].long())
            local = torch.where(local < 0, experts, local)  # behind all others, where no GEMM looks
        weights = {"w13": self._weight("w13", w1), "w2": self._weight("w2", w2)}

        def project(name: str, x: Tensor, offs: Tensor, _: Tensor) -> Tensor:
            if elsewhere and not x.is_cuda:  # the reference wants every row to have an expert; these are cleared later
                offs = torch.cat([offs[:-1], offs.new_tensor([len(x)])])
            return projection(x, weights[name], None, self.chosen.activation, self.chosen.residual, None, None, offs)

        weighted = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        stack = _Stack(experts, lambda first: self._gate(activation, first), elsewhere)
        output.copy_(grouped_forward(stack, project, hidden_states, local, weighted))

    def _gate(self, activation: MoEActivation, first: Tensor) -> Tensor:
        if not first.is_cuda:
            return gate_on_cpu(activation, first, self.activation_config)
        joined = first.new_empty(first.shape[0], self.adjust_N_for_activation(first.shape[1], activation))
        self.activation(activation, joined, first)
        return joined


class _Stack:
    """What ``grouped_forward`` asks a module for."""

    def __init__(self, num_experts: int, gate: Callable[[Tensor], Tensor], elsewhere: bool) -> None:
        self.layout = ExpertsLayout(first=("w13",), down="w2")
        self.num_experts, self._is_expert_parallel = num_experts, elsewhere
        self.gate, self.original_class = gate, _Stack

    def _apply_gate(self, first: Tensor) -> Tensor:
        return self.gate(first)


def gate_on_cpu(activation: MoEActivation, first: Tensor, config: Any) -> Tensor:
    """VLLM's CUDA wheel has no gate functions for a CPU: those of its formulas that need nothing but torch."""
    functions: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
        MoEActivation.SILU: F.silu,
        MoEActivation.GELU: F.gelu,
        MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
        MoEActivation.RELU2: lambda x: F.relu(x).square(),
    }
    found = next((f for a, f in functions.items() if activation in (a, a.without_mul())), None)
    if found is None or config.clamp_limit is not None:
        raise NotImplementedError(f"quads_qat: no {activation.value} gate (clamp {config.clamp_limit}) for a CPU")
    if not activation.is_gated:
        return found(first)
    gate, up = first.chunk(2, dim=-1)
    return found(gate) * up


def experts_chooser(original: Callable[..., Any], dialect: Dialect) -> Callable[..., Any]:
    """What stands for vLLM's ``select_nvfp4_moe_backend``.

    The backend that it names is vLLM's emulation, because that is how weights keep the layout of the checkpoint.
    """

    def select_nvfp4_moe_backend(config: Any, weight_key: Any, activation_key: Any) -> tuple[Any, type]:
        chosen = _of_current_model(dialect, weights_only=activation_key is None)
        if chosen is None:
            return original(config=config, weight_key=weight_key, activation_key=activation_key)
        if chosen.activation.scale is ActivationScale.STATIC:
            raise ValueError(
                "quads_qat: vLLM keeps of the experts' input scales only a reciprocal, which is not their bits; set "
                "QUADS_QAT_ACTIVATION_SCALE=per_token"
            )
        own = {"chosen": chosen, "placeholders": _holds_placeholders()}
        experts = type("QuadsNvFp4Experts", (QuadsNvFp4Experts,), own)
        batched = config.moe_parallel_config.use_batched_activation_format
        form = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
        supported, reason = experts.is_supported_config(experts, config, weight_key, activation_key, form)
        if supported and config.has_bias:
            supported, reason = False, "experts have biases"
        if not supported:
            raise ValueError(f"quads_qat: the plugin cannot compute these experts: {reason}; unset QUADS_QAT_VLLM")
        return NvFp4MoeBackend.EMULATION, experts

    return select_nvfp4_moe_backend
