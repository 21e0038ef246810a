"""``coverage``: what ``convert`` did to a model, for people: which weights are quantized, which are not and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quads_qat.config import Mode
from quads_qat.conversion import Skipped, conversion_of


@dataclass(frozen=True)
class Coverage:
    """Which weights are quantized, which are not and why, and what shares a scale.

    Attributes:
        quantized: parameter name -> (elements, scale group).
        skipped: modules with weights that stay in high precision, with reasons. Biases of quantized experts, which
            never are quantized, are not listed.
        groups: scale group -> names of its weights.
    """

    quantized: dict[str, tuple[int, str]]
    skipped: list[Skipped]
    groups: dict[str, list[str]]

    @property
    def quantized_elements(self) -> int:
        """Weights under quantization."""
        return sum(elements for elements, _ in self.quantized.values())

    @property
    def fraction(self) -> float:
        """Share of the weights of two or more dims that are quantized."""
        total = self.quantized_elements + sum(s.elements for s in self.skipped)
        return self.quantized_elements / total if total else 0.0

    def __str__(self) -> str:
        lines = [
            f"quantized: {len(self.quantized)} weights, {self.quantized_elements:,} elements, {self.fraction:.1%} "
            "of all"
        ]
        lines += [
            f"  {group}: {', '.join(n.rpartition('.')[0] if n.endswith('.weight') else n for n in names)}"
            for group, names in self.groups.items()
        ]
        lines.append(f"not quantized: {len(self.skipped)} modules")
        lines += [f"  {s.module or '(root)'} ({s.kind}, {s.elements:,}): {s.reason}" for s in self.skipped]
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """What ``convert`` did to ``model``. Print it before a long run."""
    root, conversion = conversion_of(model, "coverage")
    quantized, groups = {}, {}
    for name, weight in conversion.weights.items():
        module = root.get_submodule(weight.module)
        rollout = conversion.mode is Mode.W4A4_RESIDUAL
        while "base_layer" in module._modules:  # wrapped by adapters, one layer for each parameter
            module = module.get_submodule("base_layer")
        shape = module.packed(weight.parameter).shape if rollout else module._parameters[weight.parameter].shape  # pyright: ignore
        quantized[name] = (shape.numel(), weight.group)
        groups.setdefault(weight.group, []).append(name)
    return Coverage(quantized, list(conversion.skipped), groups)
