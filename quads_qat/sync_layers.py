"""A weight sync under way: what has come waits until its layer is complete, then the layer is changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quads_qat import dialects, ops
from quads_qat.autograd import group_amax
from quads_qat.checkpoint_plan import Assembly, DiskWeight, layer_of, natural_order
from quads_qat.config import Recipe
from quads_qat.contract import Contract
from quads_qat.conversion import Conversion, Weight
from quads_qat.formats import BLOCK_SIZE, E2M1_MAGNITUDES
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import quantize_master
from quads_qat.scale_groups import whole
from quads_qat.sync_ledger import Ledger
from quads_qat.sync_plan import PackedTarget, SyncPlan, Target, module_of


@dataclass
class SyncReport:
    """What a weight sync did.

    Attributes:
        tensors: how many were taken.
        layers: how many layers (and the rest outside of layers, as one) have new weights.
        missing: names of tensors that did not come (``strict=False``); layers that lack one keep their old weights.
        unexpected: names that belong to nothing (``strict=False``).
    """

    tensors: int = 0
    layers: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Sync:
    """Holds what has come until its layer is complete, then changes the layer."""

    def __init__(
        self,
        root: nn.Module,
        conversion: Conversion,
        plan: SyncPlan,
        made_under: Contract | None,
    ) -> None:
        self.root, self.conversion, self.plan = root, conversion, plan
        self.ledger, self.report = Ledger(root, conversion, plan, made_under), SyncReport()
        self.new: set[str] = set()  # units that have new weights
        self.changing = ""  # the parameter whose unit is being changed
        self.inference = any(t.is_inference() for t in self.ledger.live.values())  # changed in inference mode only
        self.parts: dict[str, dict[str, Tensor]] = {}  # tensors of one weight on disk that wait for each other
        self.assemblies: dict[str, Assembly] = {}  # packed parameters
        self.staged: dict[str, Tensor] = {}  # parameters in high precision; quantized ones wait for their scale group
        self.ready: dict[str, NVFP4Tensor | Tensor] = {}  # complete, checked, waiting for its layer
        self.written: set[str] = set()
        self.unseen: dialects.UnseenScales | None = None
        self.aligned: list[tuple[DiskWeight, Tensor]] = []  # per-tensor scales that nobody has looked at either
        self.scales: dict[tuple[str, int | None], Tensor] = {}
        self.places: dict[str, tuple[torch.Size, torch.device]] = {}  # of packed parameters
        self.input_amaxes: dict[str, list[Tensor]] = {}
        self.looks = True  # whether masters may be decoded weights: a look waits for a GPU, and most streams need one
        self.requantized: list[str] = []  # decoded weights that quantizing again has changed
        self.groups: dict[str, list[Weight]] = {}
        for weight in conversion.weights.values():
            self.groups.setdefault(weight.group, []).append(weight)

    def take(self, name: str, tensor: Tensor) -> None:
        """One tensor, copied or consumed."""
        with torch.inference_mode() if self.inference else torch.no_grad():
            self._take(name, tensor)

    def _take(self, name: str, tensor: Tensor) -> None:
        tensor = whole(tensor.detach())
        place = self.ledger.enter(name, tensor.dtype, tuple(tensor.shape))
        if isinstance(place, PackedTarget):
            if place.input_scale:
                self._take_input_scale(name, place.disk, tensor)
            else:
                self._take_packed(name, place.disk, tensor)
        else:
            for target in place:
                self._take_plain(name, target, tensor)
        self.report.tensors += place != []

    def _take_packed(self, name: str, disk: DiskWeight, tensor: Tensor) -> None:
        weight, recipe = disk.weight, self.conversion.recipe
        if weight.name not in self.places:
            here = module_of(self.root, weight).packed(weight.parameter)
            self.places[weight.name] = here.shape, here.device
        shape, device = self.places[weight.name]
        held = self.parts.setdefault(disk.name, {})
        held[name] = tensor.to(device, copy=True)
        if len(held) < 3:
            return
        del self.parts[disk.name]
        dialect = self.ledger.dialect
        assert dialect is not None
        if self.unseen is None:
            self.unseen = dialects.UnseenScales(dialect)
        q = dialects.read(disk.name, held, dialect, recipe, transposed=disk.stored_transposed, unseen=self.unseen)
        if recipe is Recipe.ALIGNED:
            self.aligned.append((disk, q.per_tensor_scale))
        if weight.name not in self.assemblies:
            self.assemblies[weight.name] = Assembly(weight, shape, device)
        self.assemblies[weight.name].add(disk, q)
        if self.ledger.complete(weight.name):
            self._finish_packed(weight, self.assemblies.pop(weight.name).finish())

    def _require_sound_scales(self) -> None:
        """Of all weights that have come: looked at together, once a layer, since a look waits for the device."""
        if self.unseen is not None:
            try:
                self.unseen.require_sound()
            except ValueError as error:
                raise ValueError(f"update_weights: {error}") from error
        if self.aligned:
            self._require_aligned()

    def _require_aligned(self) -> None:
        """The recipe that only this package writes: scales are powers of two, and shared in a scale group."""
        came, self.aligned = self.aligned, []
        scales = torch.stack([scale for _, scale in came])
        shared = torch.stack([self.scales.setdefault(disk.scale_key, scale) for disk, scale in came])
        powers = torch.frexp(scales)[0] == 0.5
        if bool((powers & (scales == shared)).all()):
            return
        for (disk, scale), is_power, group in zip(came, powers, shared, strict=True):
            if not is_power:
                raise ValueError(
                    f"update_weights: the per-tensor scale of {disk.name} must be a power of two (recipe 'aligned'), "
                    f"got {scale.item()}; the trainer has another recipe than the rollout"
                )
            if scale != group:
                raise ValueError(
                    f"update_weights: the per-tensor scale of {disk.name} is {scale.item()}, that of others in its "
                    f"scale group {disk.weight.group} {group.item()}; they must share one, from one step of one trainer"
                )

    def _take_input_scale(self, name: str, disk: DiskWeight, tensor: Tensor) -> None:
        assert self.ledger.dialect is not None
        amax = dialects.amax_of_input_scale(f"update_weights: {name}", tensor, self.ledger.dialect)
        self.input_amaxes.setdefault(disk.weight.name, []).append(amax)

    def _take_plain(self, name: str, target: Target, tensor: Tensor) -> None:
        parameter, weight = target.parameter, self.conversion.weights.get(target.parameter)
        if parameter in self.written:
            self._require_same(name, target, tensor)
            return
        if parameter not in self.staged:
            if weight is None:
                live = self.ledger.live[parameter]
                dtype, device = live.dtype, live.device
            else:
                dtype = weight.format.export_dtype
                device = module_of(self.root, weight).packed(weight.parameter).device
            self.staged[parameter] = torch.empty(self.plan.shapes[parameter], dtype=dtype, device=device)
        target.write(tensor, self.staged[parameter])
        if not self.ledger.complete(parameter):
            return
        self.written.add(parameter)
        if weight is None:
            staged = self.staged.pop(parameter)
            _require_finite(name, staged)
            self._finish(parameter, staged)
        elif self.written.issuperset(member.name for member in self.groups[weight.group]):
            self._quantize(self.groups[weight.group])

    def _require_same(self, name: str, target: Target, tensor: Tensor) -> None:
        """A tied weight that comes under another name too has the same values (once quantized, nobody can tell)."""
        before = self.staged.get(target.parameter, self.ready.get(target.parameter))
        if before is None and target.parameter not in self.conversion.weights:
            before = self.ledger.live[target.parameter]
        if not isinstance(before, Tensor):
            return
        again = torch.empty_like(before, memory_format=torch.contiguous_format)
        target.write(tensor, again)
        if not torch.equal(before, again):
            raise ValueError(
                f"update_weights: {name} is tied to {target.parameter} in the rollout, but came with other values; "
                "untie the rollout, or send one of them"
            )

    def _quantize(self, members: list[Weight]) -> None:
        masters = {weight.name: self.staged.pop(weight.name) for weight in members}
        amax = group_amax(list(masters.values()), members[0].format)
        for weight in members:
            master = masters.pop(weight.name)
            try:
                q = quantize_master(weight, master, amax)
            except ValueError as error:
                raise ValueError(f"update_weights: {error}") from error
            if self.looks:
                self._look(weight, master.mT if weight.format.transposed else master, q)
            self._finish_packed(weight, q)

    def _look(self, weight: Weight, master: Tensor, q: NVFP4Tensor) -> None:
        """Whether a master [..., K] was decoded from NVFP4 and is not what came, now that it is quantized again."""
        magnitudes = most_magnitudes(master)
        self.looks = magnitudes <= len(E2M1_MAGNITUDES)  # no decoded weights: nor are the others
        made_up = magnitudes < 6  # constants, signs: they tell nothing
        if self.looks and not made_up and not torch.equal(ops.dequantize(q, master.dtype), master):
            self.requantized.append(weight.name)

    def _finish_packed(self, weight: Weight, q: NVFP4Tensor) -> None:
        try:
            self._finish(weight.name, module_of(self.root, weight).fit_packed(weight.parameter, q))
        except ValueError as error:
            self._require_sound_scales()  # says better what was wrong
            raise ValueError(f"update_weights: {weight.name}: {error}") from error

    def _finish(self, parameter: str, value: NVFP4Tensor | Tensor) -> None:
        """A parameter is complete; with the last of its layer, the layer is changed."""
        self.ready[parameter] = value
        unit = self.plan.units[parameter]
        layer = self.plan.members.get(unit, [])
        if parameter not in layer:
            layer = [parameter]  # one that checkpoints do not hold: for itself
        elif any(name not in self.ready for name in layer):
            return
        self._require_sound_scales()
        self.changing = parameter
        for name in layer:
            new = self.ready.pop(name)
            if isinstance(new, Tensor):
                self.ledger.live[name].copy_(new)
            else:
                weight = self.conversion.weights[name]
                module_of(self.root, weight).load_packed(weight.parameter, new)
        self.changing = ""
        self.new.add(unit)
        self.report.layers += 1

    @torch.no_grad()
    def finish(self, strict: bool) -> SyncReport:
        """Nothing more comes."""
        self._require_sound_scales()
        self.report.missing, self.report.unexpected = self.ledger.missing(), self.ledger.unexpected
        self.ledger.require_whole("the sync", strict=strict)
        for name in self.ledger.using_input_scales():
            if name in self.input_amaxes:
                weight, amax = self.conversion.weights[name], torch.stack(self.input_amaxes[name]).amax()
                module_of(self.root, weight).set_calibrated(weight.parameter, "input_amax", amax)
        return self.report

    def ages(self) -> str:
        """Which layers have new weights so far, and which old ones, in words."""
        half = {self.plan.units[self.changing]} if self.changing else set()
        layers: dict[str, set[str]] = {"new weights": set(), "half new": set(), "old weights": set()}
        for unit, parameters in self.plan.members.items():
            age = "half new" if unit in half else "new weights" if unit in self.new else "old weights"
            layers[age].update(map(layer_of, parameters))
        return "; ".join(f"{age}: {_runs(found)}" for age, found in layers.items() if found or age != "half new")


def most_magnitudes(weight: Tensor) -> int:
    """The most magnitudes of a block, among rows [..., K] here and there: up to 8 of decoded weights, of others 16."""
    rows = weight[tuple(slice(None, None, max(1, size // 8)) for size in weight.shape[:-1])]
    if rows.numel() == 0:
        return 0
    magnitudes = rows.abs().unflatten(-1, (-1, BLOCK_SIZE)).sort(-1).values
    return int((magnitudes.diff(dim=-1) != 0).sum(-1).max()) + 1


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # one pass; both are NaN if there is one
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"update_weights: {name} holds {bad} NaN or inf of {tensor.numel()} elements in {tensor.dtype}; find the "
            "step that made them"
        )


def _runs(layers: set[str]) -> str:
    """Like ``model.layers.0-60, what is in no layer``."""
    runs: list[tuple[str, int, int]] = []
    for layer in sorted(layers - {""}, key=natural_order):
        parent, _, number = layer.rpartition(".")
        first = last = int(number)
        if runs and (runs[-1][0], runs[-1][2] + 1) == (parent, first):
            first = runs.pop()[1]
        runs.append((parent, first, last))
    found = [f"{parent}.{first}" if first == last else f"{parent}.{first}-{last}" for parent, first, last in runs]
    return ", ".join([*found, *(["what is in no layer"] if "" in layers else [])]) or "none"
