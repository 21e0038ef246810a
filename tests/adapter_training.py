"""Converted models with LoRA adapters of PEFT, and a training run of a few steps; without PEFT, tests that import this
are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

pytest.importorskip("peft", reason="needs peft (the extra dev brings it)")

from peft import LoraConfig, PeftModel, get_peft_model

import quads_qat as qq
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft import QuantizedLoraExperts, lora_config, quantize_merged
from quads_qat.integrations.peft_layers import QuantizedLora

LINEARS = {"target_modules": ["q_proj", "v_proj", "o_proj"]}  # k_proj shares its scale with q and v; it has no adapter
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
BOTH = EXPERTS | {"target_modules": ["q_proj", "v_proj"]}
RECIPE = qq.Recipe.MODELOPT  # with powers of two (aligned) another amax seldom shows in the weights
ORDERS = pytest.mark.parametrize("order", ["convert first", "peft first"])
DISPATCHES = pytest.mark.parametrize("dispatch", ["eager", "grouped_mm"])


def base_model(dtype: torch.dtype = torch.bfloat16, dispatch: str = "grouped_mm") -> nn.Module:
    return tiny_model("qwen3_moe", dtype=dtype, experts_implementation=dispatch)


def with_adapters(order: str, base: nn.Module, **options: Any) -> PeftModel:
    """``base`` converted, and a PeftModel of it, in either order."""
    if order == "convert first":
        return get_peft_model(qq.convert(base, "w4a16", recipe=RECIPE), lora_config(**options))
    return quantize_merged(qq.convert(get_peft_model(base, LoraConfig(**options)), "w4a16", recipe=RECIPE))


def trainer(
    order: str = "convert first", dispatch: str = "grouped_mm", dtype: torch.dtype = torch.bfloat16, rank: int = 4
) -> PeftModel:
    """Adapters on attention and experts that do something."""
    return randomized(with_adapters(order, base_model(dtype, dispatch), **BOTH, r=rank))


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Factors with few bits: B A and its sums are exact in fp32 in any order, and in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator) / 16)
    return model


def expert_layers(model: nn.Module) -> dict[str, QuantizedLoraExperts]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLoraExperts)}
    assert found
    return found


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


def with_merged_weights(base: nn.Module, model: nn.Module) -> nn.Module:
    """``base``, a converted model without adapters, with the masters of ``model`` and PEFT's own products added."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLora):
            parameter = layer.get_param()
            full = next(
                full for m, p, full in _members(layer) if (m, p) == (layer.get_base_layer(), layer.parameter_name)
            )
            total = parameter.detach().float()
            for name in layer.active_adapters:
                total = total + layer.get_delta_weight(name).detach().float().view_as(total)
            with torch.no_grad():
                base.get_parameter(full).copy_(total)
    return base


def _members(layer: QuantizedLora) -> list[tuple[nn.Module, str, str]]:
    base = layer.get_base_layer()
    groups = base.scale_groups if isinstance(base, W4A16Experts) else {"weight": base.scale_group}
    return groups[layer.parameter_name].members


def ids(seed: int = 0) -> Tensor:
    """Tokens [2, 9]."""
    return torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int = 2) -> list[float]:
    """The losses of AdamW on whatever wants gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens = ids(step % 2).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
