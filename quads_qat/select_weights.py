"""Which parameters of a model are quantized, how, and why the others are not.

Selection touches nothing: every module that holds a weight is quantized, listed with the reason why not, or an error.
It reads names, shapes and dtypes only, so a model on the meta device will do; ``convert`` acts on the result, and
everything that deals with checkpoints plans with it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.config import Mode, Recipe, Scope, WeightFormat
from quads_qat.conversion import Conversion, Skipped, Weight, full_name
from quads_qat.experts_layout import ExpertsLayout, layout_of
from quads_qat.formats import BLOCK_SIZE, FLOATS
from quads_qat.linear import ActivationObserver
from quads_qat.scale_groups import ZERO3, ScaleGroup, activation_key, group_key, is_zero3, joined_group
from quads_qat.selection import default_exclusion, first_match, in_scope, patterns_of
from quads_qat.sharding import cut_block


def check_patterns(**arguments: Sequence[str]) -> None:
    """Patterns are lists of globs, names and valid regular expressions."""
    for argument, patterns in arguments.items():
        if isinstance(patterns, str):
            raise TypeError(f"convert: {argument} must be a list of patterns, got {patterns!r}; pass [{patterns!r}]")
        for pattern in patterns:
            expression = pattern if argument == "groups" else pattern[3:] if pattern.startswith("re:") else ""
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"convert: {argument}: {pattern!r} is no regular expression: {error}") from None


def select(
    model: nn.Module,
    *,
    recipe: Recipe = Recipe.ALIGNED,
    scope: Scope = Scope.ALL,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    groups: Sequence[str] = (),
    only: Collection[str] | None = None,
    export_dtype: torch.dtype | None = None,
) -> Conversion:
    """Decide for every module that holds weights; reads names, shapes and dtypes only (works on meta).

    ``only`` names the modules to quantize and puts every rule aside: what a checkpoint holds is a fact. So does
    ``export_dtype``, what weights were cast to before they were quantized; None: their own dtype, or of fp32 masters
    the config's.
    """
    check_patterns(include=include, exclude=exclude, groups=groups)
    owners = _owners(model)
    for pattern in (*include, *exclude):
        if not any(first_match(name, [pattern]) for name in owners):
            example = next((name for name, module in owners.items() if isinstance(module, nn.Linear)), "")
            like = f"names are like {example!r}" if example else "the names are those of model.named_modules()"
            raise ValueError(f"convert: no module with weights matches {pattern!r}; {like}")
    users = _users_of_parameters(owners)
    conversion = Conversion(Mode.W4A16, recipe, scope, {}, [], {}, {}, rules=tuple(groups))
    for name, module in owners.items():
        if only is None:
            reason = _why_not(name, module, users, scope, include, exclude)
            if reason is not None and name in include and not first_match(name, exclude):
                raise ValueError(f"convert: include names {name!r}, which cannot be quantized: {reason}")
        else:
            reason = None if name in only else "in high precision in the checkpoint"
        if reason is None:
            _add_weights(conversion, name, module, model, groups, export_dtype)
        else:
            elements = sum(p.numel() for p in module._parameters.values() if p is not None)
            conversion.skipped.append(Skipped(name, _kind(module), elements, reason))
    _check_blocks(conversion, owners)
    _join_groups(conversion, groups)
    if not conversion.weights:
        skipped = "; ".join(f"{s.module or '(root)'}: {s.reason}" for s in conversion.skipped[:3])
        raise ValueError(
            f"convert: nothing to quantize in {type(model).__name__} (scope='{scope}'); "
            f"{skipped or 'it holds no weights'}"
        )
    if only is None:
        _check_groups(conversion, owners, groups)
    return conversion


def _add_weights(
    conversion: Conversion,
    name: str,
    module: nn.Module,
    model: nn.Module,
    groups: Sequence[str],
    export_dtype: torch.dtype | None,
) -> None:
    layout = None if isinstance(module, nn.Linear) else layout_of(module)
    for parameter in ("weight",) if layout is None else layout.parameters:
        weight, full = module._parameters[parameter], full_name(name, parameter)
        assert weight is not None
        _check_weight(full, weight, layout)
        fmt = WeightFormat(
            recipe=conversion.recipe,
            export_dtype=export_dtype or (_export_dtype(model) if weight.dtype == torch.float32 else weight.dtype),
            transposed=layout is not None and layout.transposed,
            # llm-compressor takes every stack apart first, and byte identity with it is that recipe's purpose
            per_expert=layout is not None and (layout.per_expert or conversion.recipe is Recipe.LLM_COMPRESSOR),
        )
        group = group_key(name if layout is None else full, groups)
        conversion.weights[full] = Weight(name, parameter, fmt, group)
        conversion.groups.setdefault(group, ScaleGroup(group)).members.append((module, parameter, full))
        key = activation_key(group)
        conversion.observers.setdefault(key, ActivationObserver(key))


def _join_groups(conversion: Conversion, rules: Sequence[str]) -> None:
    """Merge groups of linears that read the same input (an attention's gate or indexer, and its q/k/v)."""
    for full, weight in conversion.weights.items():
        target = None if weight.parameter != "weight" else joined_group(weight.module, conversion.groups)
        if target is None or target == weight.group or any(re.search(rule, weight.module) for rule in rules):
            continue
        first = conversion.groups[target].members[0]
        member = next(member for member in conversion.groups[weight.group].members if member[2] == full)
        if conversion.weights[first[2]].format != weight.format or _dtype(first) != _dtype(member):
            continue  # kept in another precision: no engine can give them one scale
        conversion.groups[weight.group].members.remove(member)
        conversion.groups[target].members.append(member)
        conversion.weights[full] = replace(weight, group=target)
        if not conversion.groups[weight.group].members:
            del conversion.groups[weight.group]
            conversion.observers.pop(activation_key(weight.group))


def _dtype(member: tuple[nn.Module, str, str]) -> torch.dtype:
    return member[0]._parameters[member[1]].dtype  # pyright: ignore[reportOptionalMemberAccess]


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold a parameter of two or more dims directly."""
    for name, module in model.named_modules():
        if any(isinstance(p, nn.UninitializedParameter) for p in module._parameters.values()):
            raise ValueError(f"convert: {name} has no weight before its first forward (it is lazy); run a batch first")
    return {
        name: module
        for name, module in model.named_modules()
        if any(p is not None and p.ndim >= 2 for p in module._parameters.values())
    }


def _kind(module: nn.Module) -> str:
    return getattr(module, "original_class", type(module)).__name__


def _users_of_parameters(owners: dict[str, nn.Module]) -> dict[int, list[str]]:
    """Id of a parameter -> the modules that hold it."""
    users: dict[int, list[str]] = {}
    for name, module in owners.items():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append(name)
    return users


def _why_not(
    name: str,
    module: nn.Module,
    users: dict[int, list[str]],
    scope: Scope,
    include: Sequence[str],
    exclude: Sequence[str],
) -> str | None:
    """The reason why a module stays in high precision; None if it is to be quantized."""
    kind = type(module).__name__
    linear = isinstance(module, nn.Linear)
    layout = None if linear else layout_of(module)
    if pattern := first_match(name, exclude):
        return f"excluded by {pattern!r}"
    included = first_match(name, include) is not None
    if not included and (reason := default_exclusion(name)):
        return reason
    if not linear and layout is None and "expert" in f"{name}.{kind}".lower() and (included or in_scope(name, scope)):
        raise ValueError(
            f"convert: {name} is a {kind}, an experts class of unknown layout; pass exclude=[{name!r}] "
            "(--exclude) to leave it in high precision"
        )
    if not included and not in_scope(name, scope):
        return f"outside scope='{scope}'"
    if not linear and layout is None:
        return f"{kind} is neither a linear nor experts"
    if linear and type(module) is not nn.Linear:
        return f"{kind} is a subclass of nn.Linear with a forward of its own"
    parameters = ("weight",) if layout is None else layout.parameters
    if any(module._parameters.get(parameter) is None for parameter in parameters):
        return "its weight is computed from other parameters"
    for parameter in parameters:
        others = [user for user in users[id(module._parameters[parameter])] if user != name]
        if others:
            return f"tied: shares its parameter with {others[0]}"
    if "forward" in module.__dict__:
        raise ValueError(
            f"convert: the forward of {name} was replaced on the instance (as hooks of accelerate and "
            "transformers' tp_plan and ep_size do), which would bypass quantization; convert first, then add "
            f"accelerate's hooks or shard with PyTorch's own parallelize_module, or pass exclude=[{name!r}]"
        )
    return None


def _check_weight(name: str, weight: Tensor, layout: ExpertsLayout | None) -> None:
    if is_zero3(weight):
        raise ValueError(f"convert: {name} {ZERO3}")
    if weight.numel() == 0:
        raise ValueError(f"convert: {name} {list(weight.shape)} holds nothing; remove it, or exclude its module")
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"convert: {name} is {weight.dtype}; master weights must be float32, bfloat16 or float16. Load the model "
            f"unquantized, or exclude {name.rpartition('.')[0]!r}"
        )
    if problem := cut_block(weight, -2 if layout is not None and layout.transposed else -1):
        raise ValueError(
            f"convert: {name} is sharded, and {problem}; cut it along its output dim, or leave it in high precision "
            f"with exclude=[{name.rpartition('.')[0]!r}]"
        )


def _check_blocks(conversion: Conversion, owners: dict[str, nn.Module]) -> None:
    """All weights at once: who leaves out one of them meets the next."""
    sizes = {
        full: int(owners[w.module]._parameters[w.parameter].shape[-2 if w.format.transposed else -1])  # pyright: ignore[reportOptionalMemberAccess]
        for full, w in conversion.weights.items()
    }
    if cut := [full for full, k in sizes.items() if k % BLOCK_SIZE]:
        modules = dict.fromkeys(conversion.weights[full].module for full in cut)
        others = {w.module for w in conversion.weights.values()} - modules.keys()
        raise ValueError(
            f"convert: {cut[0]} has an input dim K of {sizes[cut[0]]}, which is not a multiple of 16 (one NVFP4 block)"
            + (f"; nor is that of {len(cut) - 1} more" if len(cut) > 1 else "")
            + f"; pass exclude={patterns_of([*modules], others)} to leave {'them' if len(cut) > 1 else 'it'} in high "
            "precision"
        )


def _check_groups(conversion: Conversion, owners: dict[str, nn.Module], rules: Sequence[str]) -> None:
    for rule in rules:
        if not any(
            re.search(rule, w.module if w.parameter == "weight" else w.name) for w in conversion.weights.values()
        ):
            raise ValueError(f"convert: groups: no quantized module matches {rule!r}; see quads_qat.coverage(model)")
    fused: dict[str, Weight] = {}
    for weight in conversion.weights.values():
        sibling = fused.setdefault(group_key(weight.module), weight)
        if rules and weight.parameter == "weight" and sibling.group != weight.group:
            warnings.warn(
                f"convert: groups: {sibling.module} and {weight.module} get a scale each, but engines fuse them into "
                "one GEMM with one scale and would decode one of them wrong; let a rule catch both or neither",
                stacklevel=4,
            )
            break
    for skipped in conversion.skipped:
        key = group_key(skipped.module, rules)
        if key in conversion.groups and isinstance(owners[skipped.module], nn.Linear):
            member = conversion.groups[key].members[0][2]
            raise ValueError(
                f"convert: {skipped.module} ({skipped.reason}) and {member} share one scale in every engine, which "
                "fuses them; exclude both or neither"
            )
    for key, group in conversion.groups.items():
        found = {}
        for module, parameter, full in group.members:
            weight, fmt = module._parameters[parameter], conversion.weights[full].format
            assert weight is not None
            found.setdefault((weight.dtype, fmt, weight.shape[0] if fmt.per_expert else 1), full)
        if len(found) > 1:
            one, other, *_ = found.values()
            raise ValueError(
                f"convert: {one} and {other} share one scale ({key}), but not dtype and layout; cast or exclude them, "
                "or change groups"
            )


def _export_dtype(model: nn.Module) -> torch.dtype:
    """What fp32 masters are cast to: the config's dtype, bf16 if that is fp32 or unknown."""
    return cast_of(getattr(getattr(model, "config", None), "dtype", None))


def cast_of(dtype: Any) -> torch.dtype:
    """What fp32 masters are cast to where the config has this dtype, or its name; bf16 if it is fp32 or unknown."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.bfloat16)
