"""Which tensors of a weight sync have come, and whether they may: by name, dtype and shape alone."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from quads_qat import dialects
from quads_qat.checkpoint_plan import DiskWeight
from quads_qat.config import Dialect, Scope, WeightScale
from quads_qat.contract import Contract
from quads_qat.conversion import Conversion, Weight
from quads_qat.experts_layout import layout_of
from quads_qat.selection import default_exclusion, in_scope
from quads_qat.sync_plan import PackedTarget, SyncPlan, Target, module_of

_PACKED, _HIGH_PRECISION = "packed", "in high precision"


class Ledger:
    """Which tensors have come, by name, dtype and shape alone: the same rules for a rehearsal and for the sync."""

    def __init__(
        self,
        root: nn.Module,
        conversion: Conversion,
        plan: SyncPlan,
        contract: Contract | None = None,
    ) -> None:
        self.root, self.conversion, self.plan, self.contract = root, conversion, plan, contract
        with conversion.sync.readable():
            self.live: dict[str, Tensor] = root.state_dict(keep_vars=True)
        self.seen: set[str] = set()
        self.unexpected: list[str] = []
        self.dialect: Dialect | None = None  # of the packed tensors, once a name has told
        self.filled: dict[str, int] = {}  # parameter -> elements, or packed tensors, that have come
        self.forms: dict[str, str] = {}  # scale group -> _PACKED or _HIGH_PRECISION
        self.listed = set() if contract is None else contract.modules()
        self.beyond = [] if contract is None else self._covered_beyond(contract.scope)
        self.first: dict[str, str] = {}  # form -> the first name that came in it, of weights that come in either
        self.input_scales: dict[str, int] = {}  # quantized parameter -> activation scales that have come

    def enter(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> PackedTarget | list[Target]:
        """Where a tensor belongs; [] if nowhere."""
        if name in self.seen:
            raise ValueError(f"update_weights: {name} came twice; send each tensor once")
        self.seen.add(name)
        packed, plain = self.plan.packed.get(name), self.plan.plain.get(name, [])
        if packed is not None and (not plain or _is_packed(packed, plain, dtype, shape)):
            return self._enter_packed(name, packed, dtype, shape)
        for target in plain:
            self._enter_plain(name, target, dtype, shape)
        if not plain and not any(re.search(pattern, name) for pattern in self.plan.ignored):
            self.unexpected.append(name)
        return plain

    def _enter_packed(
        self, name: str, places: dict[Dialect, PackedTarget], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> PackedTarget:
        if self.dialect is None and len(places) == 1:
            (self.dialect,) = places
        if self.dialect is not None and self.dialect not in places:
            raise ValueError(
                f"update_weights: {name} is a tensor of the {next(iter(places))} dialect, but this sync began in the "
                f"{self.dialect} dialect; send all packed tensors in one"
            )
        if self.dialect is not None and not dialects.carries(self.dialect, self.conversion.recipe):
            raise ValueError(
                f"update_weights: {name}: packed tensors of the {self.dialect} dialect cannot be of recipe "
                f"'{self.conversion.recipe}', which the rollout has; send another dialect, or weights in high precision"
            )
        target = next(iter(places.values())) if self.dialect is None else places[self.dialect]
        if target.layout is None:
            if dtype != torch.float32 or shape not in ((), (1,)):
                raise ValueError(f"update_weights: {name} must be one float32 number, got {dtype} {list(shape)}")
        elif (dtype, shape) != target.layout:
            raise ValueError(
                f"update_weights: {name} must be {target.layout[0]} {list(target.layout[1])}, got {dtype} {list(shape)}"
            )
        weight = target.disk.weight
        if target.input_scale:
            self.input_scales[weight.name] = self.input_scales.get(weight.name, 0) + 1
        else:
            self._enter_form(name, weight, _PACKED)
            self.filled[weight.name] = self.filled.get(weight.name, 0) + 1
        return target

    def _enter_plain(self, name: str, target: Target, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        weight = self.conversion.weights.get(target.parameter)
        if shape != target.shape:
            raise ValueError(f"update_weights: {name} must have shape {list(target.shape)}, got {list(shape)}")
        here = self.live[target.parameter].dtype if weight is None else weight.format.export_dtype
        floats = dtype.is_floating_point and here.is_floating_point
        exact = here == torch.float32 and weight is None  # a 16-bit tensor for parameters in fp32
        if dtype != here and not (floats and (dtype == torch.float32 or exact)):
            masters = " or float32, which is cast to that" if here.is_floating_point else ""
            way_out = _way_out_of_dtype(dtype, quantized=weight is not None) if floats and dtype.itemsize == 2 else ""
            raise ValueError(f"update_weights: {name} must be {here}{masters}, got {dtype}{way_out}")
        if weight is not None:
            self._enter_form(name, weight, _HIGH_PRECISION)
            if dtype == torch.float32 and weight.name in self.conversion.untold:
                raise ValueError(
                    f"update_weights: {name} is {_HIGH_PRECISION}, its trainer's export dtypes differ, and nothing "
                    "tells to which this one is cast before it is quantized; send trainer.state_dict() as it is made, "
                    "which tells, or quads_qat.export_weights(trainer)"
                )
        filled, numel = self.filled.get(target.parameter, 0), self.plan.shapes[target.parameter].numel()
        if filled == numel == target.elements and target.parameter in self.plan.tied:
            return  # under another of its names
        if filled + target.elements > numel:
            raise ValueError(
                f"update_weights: {name} is a part of {target.parameter} that came under another name already; send "
                "the names of the checkpoint or those of the model"
            )
        self.filled[target.parameter] = filled + target.elements

    def _enter_form(self, name: str, weight: Weight, form: str) -> None:
        if form == _HIGH_PRECISION and self.contract is not None:
            self._require_told(name, weight, self.contract)
        if self.forms.setdefault(weight.group, form) != form:
            raise ValueError(
                f"update_weights: {name} is {form}, but other weights of its scale group {weight.group} came "
                f"{self.forms[weight.group]}; they share one scale, so send all of them in one form"
            )
        if form == _PACKED or any(weight.name in parts for parts in self.plan.parts.values()):
            self.first.setdefault(form, name)
        if len(self.first) > 1:
            raise ValueError(
                f"update_weights: {self.first[_HIGH_PRECISION]} is {_HIGH_PRECISION} where other weights are packed, "
                f"like {self.first[_PACKED]}: its trainer does not quantize it, but this rollout would; give both "
                "the same scope, include and exclude, or load the rollout from a new export of the trainer"
            )

    def _require_told(self, name: str, weight: Weight, contract: Contract) -> None:
        """Refuse a weight in high precision if the contract says that it leaves out what the trainer multiplies by."""
        theirs = contract.scope
        if contract.weight_scale is not WeightScale.DYNAMIC:
            raise ValueError(
                f"update_weights: {name} is {_HIGH_PRECISION}, and the contract says that the trainer's scales are "
                f"held ({contract.weight_scale}), which such tensors do not tell; send packed tensors: "
                "quads_qat.export_weights(trainer), or export_checkpoint and its files"
            )
        if weight.module in self.listed:
            return  # both contracts say which modules are quantized, and were compared
        if theirs is self.conversion.scope:
            return  # what is beyond it was included, here and perhaps there
        if in_scope(weight.module, theirs):
            if not self.beyond:
                return
            what = f"covers {self.beyond[0]}, which this rollout does not quantize"
        else:
            what = "does not cover it"
        raise ValueError(
            f"update_weights: {name} is {_HIGH_PRECISION}, and the contract does not list its module; its scope "
            f"'{theirs}' {what}, and what was included or excluded is not known; pass "
            "contract=quads_qat.contract_of(trainer), which lists it, or send trainer.state_dict() as it is made or "
            "packed tensors: quads_qat.export_weights(trainer)"
        )

    def _covered_beyond(self, theirs: Scope) -> list[str]:
        """Linears and experts in high precision that the trainer's scope covers, and the rollout's does not."""
        mine, names = self.conversion.scope, [skipped.module for skipped in self.conversion.skipped]
        names = [n for n in names if in_scope(n, theirs) and not in_scope(n, mine) and default_exclusion(n) is None]
        modules = {name: self.root.get_submodule(name) for name in names}
        return [n for n, module in modules.items() if isinstance(module, nn.Linear) or layout_of(module) is not None]

    def took_masters(self) -> bool:
        """Whether weights have come that are quantized here."""
        return _HIGH_PRECISION in self.forms.values()

    def complete(self, parameter: str) -> bool:
        """Whether all of a parameter has come."""
        weight, filled = self.conversion.weights.get(parameter), self.filled.get(parameter, 0)
        if weight is not None and self.forms.get(weight.group) == _PACKED:
            return filled == 3 * len(self.parts(parameter))
        return filled == self.plan.shapes[parameter].numel()

    def parts(self, parameter: str) -> list[DiskWeight]:
        """Of a quantized parameter, in the dialect in which the sync came."""
        return self.plan.parts[self.dialect or next(iter(self.plan.parts))].get(parameter, [])

    def missing(self) -> list[str]:
        """Names of what has not come, in the form in which the rest came."""
        names: dict[str, None] = {}
        for parameter in (name for name in self.plan.required if not self.complete(name)):
            weight = self.conversion.weights.get(parameter)
            if weight is not None and self.forms.get(weight.group, _PACKED if self.dialect else "") == _PACKED:
                dialect = self.dialect or next(iter(self.plan.parts))
                for disk in self.parts(parameter):
                    names |= dict.fromkeys(dialects.tensor_names(disk.name, dialect).weight)
            else:
                names |= dict.fromkeys(self.plan.disk_names.get(parameter, [parameter]))
        return [name for name in names if name not in self.seen]

    def require_whole(self, what: str, *, strict: bool) -> None:
        """Nothing more comes: raise ValueError if ``what`` came in part, and ``strict``: for names that are unknown."""
        if strict:
            self._require_all_names(what)
            self._require_all_input_scales()
        for name in self.using_input_scales():
            if 0 < self.input_scales.get(name, 0) < len(self.parts(name)):
                raise ValueError(f"update_weights: activation scales of {name} came in part; send all or none of them")

    def using_input_scales(self) -> list[str]:
        """Quantized parameters whose input has a static scale."""
        weights = self.conversion.weights.values()
        return [w.name for w in weights if module_of(self.root, w).uses_input_amax(w.parameter)]

    def _require_all_names(self, what: str) -> None:
        missing, unexpected = self.missing(), self.unexpected
        found = [
            f"{len(names)} {kind}, {'like' if len(names) > 3 else 'namely'} {', '.join(names[:3])}"
            for names, kind in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        if found:
            raise ValueError(
                f"update_weights: {what} must name every weight once and nothing else: {'; '.join(found)}; "
                f"{_way_out(missing, unexpected)}"
            )

    def _require_all_input_scales(self) -> None:
        """Activation scales come for every weight that uses one, or for none."""
        using = self.using_input_scales() if self.input_scales else []
        lacking = [name for name in using if name not in self.input_scales]
        if lacking and len(lacking) < len(using):
            raise ValueError(
                f"update_weights: activation scales came for some weights, but not for {lacking[0]} and "
                f"{len(lacking) - 1} more; send all or none of them"
            )


def _way_out_of_dtype(dtype: torch.dtype, *, quantized: bool) -> str:
    """Where 16 bits came for other 16 bits."""
    if quantized:
        return (
            "; its trainer quantizes from that: pass contract=quads_qat.contract_of(trainer), or send "
            "trainer.state_dict() as it is made or packed weights"
        )
    return (
        f"; give the rollout its trainer's dtype: load_rollout(..., dtype={dtype}) or rollout.to({dtype}); or "
        "torch.float32, which takes all"
    )


def _way_out(missing: list[str], unexpected: list[str]) -> str:
    if any(name.startswith("base_model.model.") or ".lora_" in name for name in unexpected):
        return (
            "these are names of a model with adapters; merge first: `with quads_qat.integrations.peft.merged(model) as "
            "plain:` sync export_weights(plain)"
        )
    if missing and any(name.startswith(("_orig_mod.", "module.")) for name in unexpected):
        return "these are names of a wrapper (torch.compile, DDP); send those of the model inside: export_weights does"
    if missing and any(name.endswith("_qdata") for name in unexpected):
        return "this is the state_dict of a rollout, which rollout.load_state_dict takes"
    if missing:
        return "send the whole model, or pass strict=False"
    return "drop what the rollout has no place for, or pass strict=False, which ignores it"


def _is_packed(
    places: dict[Dialect, PackedTarget], plain: list[Target], dtype: torch.dtype, shape: tuple[int, ...]
) -> bool:
    """Which of two a tensor is meant to be whose name both have: ModelOpt's codes are called as the weight is."""
    if dtype in (torch.uint8, torch.float8_e4m3fn):
        return True
    packed_shapes = [place.layout[1] for place in places.values() if place.layout is not None]
    return shape in packed_shapes and all(shape != target.shape for target in plain)
