"""``coverage``: what ``convert`` did to a model, for people: which weights are quantized, which are not and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quads_qat.config import Mode
from quads_qat.conversion import Skipped, conversion_of
from quads_qat.name_ranges import shortened


@dataclass(frozen=True)
class Coverage:
    """Which weights are quantized, which are not and why, and what shares a scale.

    Printed, names that differ in numbers alone are one: ``layers.0-27.mlp.down_proj``. The attributes have them all.

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
        lines += [f"  {names}" for names in shortened(map(_sharing, self.groups.values()))]
        if any(len(names) > 1 for names in self.groups.values()):
            lines.append("  (names in one pair of braces share a scale)")
        lines.append(f"not quantized: {len(self.skipped)} modules")
        alike: dict[tuple[str, int, str], list[str]] = {}
        for s in self.skipped:
            alike.setdefault((s.kind, s.elements, s.reason), []).append(s.module)
        for (kind, elements, reason), modules in alike.items():
            lines += [
                f"  {name or '(root)'} ({kind}, {elements:,}{'' if name in modules else ' each'}): {reason}"
                for name in shortened(modules)
            ]
        return "\n".join(lines)


def _sharing(names: list[str]) -> str:
    """The weights of a scale group as one name: ``layers.0.{q_proj,k_proj}``."""
    modules = [name.removesuffix(".weight").removesuffix(".base_layer") for name in names]
    parents = {name.rpartition(".")[0] for name in modules}
    if len(modules) == 1 or len(parents) > 1:
        return modules[0] if len(modules) == 1 else f"{{{', '.join(modules)}}}"
    leaves = ",".join(name.rpartition(".")[2] for name in modules)
    return ".".join(filter(None, [*parents, f"{{{leaves}}}"]))


def coverage(model: nn.Module) -> Coverage:
    """What ``convert`` did to ``model``. Print it before a long run."""
    root, conversion = conversion_of(model, "coverage")
    quantized, groups = {}, {}
    for name, weight in conversion.weights.items():
        module = root.get_submodule(weight.module)
        rollout = conversion.mode is Mode.W4A4_RESIDUAL
        while wrapped := {"base_layer", "original_module"} & module._modules.keys():  # by PEFT, once for each parameter
            module = module.get_submodule(wrapped.pop())
        shape = module.packed(weight.parameter).shape if rollout else module._parameters[weight.parameter].shape  # pyright: ignore
        quantized[name] = (shape.numel(), weight.group)
        groups.setdefault(weight.group, []).append(name)
    return Coverage(quantized, list(conversion.skipped), groups)
