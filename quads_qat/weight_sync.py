"""``update_weights``: new weights for a rollout model, in place, layer by layer, from any stream of named tensors.

Between processes, flat buckets carry the stream. Over ``torch.distributed`` (gloo takes no float8, hence bytes)::

    for entries, bucket in qq.bucketed(qq.export_weights(trainer, "modelopt"), 1 << 28):  # trainer, rank 0
        dist.broadcast_object_list([(entries, bucket.numel())], src=0)
        dist.broadcast(bucket, src=0)
    dist.broadcast_object_list([None], src=0)

    def received():  # rollout
        while True:
            header = [None]
            dist.broadcast_object_list(header, src=0)
            if header[0] is None:
                return
            entries, size = header[0]
            bucket = torch.empty(size, dtype=torch.uint8, device="cuda")
            dist.broadcast(bucket, src=0)
            yield entries, bucket

    qq.update_weights(rollout, qq.unbucketed(received()))

Between processes of one GPU, CUDA IPC saves the copy: send ``(entries, torch.multiprocessing.reductions.reduce_tensor(
bucket))`` through a queue, and rebuild with ``function, arguments = handle; bucket = function(*arguments)``. Keep the
sender's bucket alive until the receiver says that it is done with it: ``update_weights`` has copied or consumed a
tensor when it asks for the next one.

CUDA graphs that were captured with a rollout compute with the new weights after an update, since no buffer moves; run
the update on the stream that replays, or synchronize in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import dialects
from quads_qat.autograd import group_amax
from quads_qat.checkpoint_plan import Assembly, DiskWeight
from quads_qat.config import Mode, Recipe
from quads_qat.contract import Contract, given_contract
from quads_qat.conversion import Conversion, Weight, conversion_of, require_unwrapped
from quads_qat.convert import quantize_master
from quads_qat.linear import HELD_SCALES
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import whole
from quads_qat.sync_ledger import Ledger
from quads_qat.sync_plan import PackedTarget, SyncPlan, Target, module_of, sync_plan

_STREAMS = "pass quads_qat.export_weights(trainer, 'modelopt') or trainer.state_dict()"

Metadata = Iterable[tuple[str, torch.dtype, tuple[int, ...]]]


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


def update_weights(
    rollout: nn.Module,
    named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    *,
    metadata: Metadata | None = None,
    strict: bool = True,
    contract: Contract | str | Path | None = None,
) -> SyncReport:
    """Give a rollout model new weights, in place: every parameter and buffer keeps its address. Any number of times.

    A layer is changed when all of its tensors have come and were found right (dtype, shape, finite), so a layer never
    mixes old and new weights. A sync that fails leaves some layers new and others old; the rollout then refuses to run,
    and to give a state_dict, until a complete sync. Tensors may come in any order, and are copied or consumed before
    the next is asked for, so their memory may be reused; order them by layers (as ``export_weights`` does) to need one
    layer of extra memory.

    Args:
        rollout: converted to ``w4a4_residual``, or from ``load_rollout``.
        named_tensors: (name, tensor) pairs or a dict, on any device. Packed tensors of one dialect in checkpoint names
            (``export_weights``), or tensors in high precision, in checkpoint names or the model's own
            (``trainer.state_dict()``). The latter are quantized on arrival with the rollout's recipe and scale
            groups, whose members wait for each other: the bits are those that ``export_weights`` gives, unless the
            trainer holds its scales (``Schedule``: frozen, ema), which masters do not tell. Sharded ones (DTensor) are
            gathered.
        metadata: (name, dtype, shape) of what will come (``export_metadata``). Everything is checked against it before
            any byte changes: a refusal leaves the rollout as it was.
        strict: False takes what comes: incomplete layers keep their old weights, unknown names are ignored.
        contract: what the weights were made under (``contract_of(trainer)``; its ``to_json`` goes through any message).
            Tensors do not say; another recipe or other scale groups than the rollout's are refused before any byte
            changes; so are weights in high precision of a trainer that holds its scales, or has another scope.

    Returns:
        What was done.

    Raises:
        ValueError: not a rollout; a tensor of a wrong dtype, shape or value (NaN, inf, a scale that is no scale); a
            name that comes twice; packed tensors of two dialects, or of one that the rollout's recipe does not go with;
            a scale group of which only a part is packed, or with several scales; at the end, missing or unexpected
            names (``strict``).
        TypeError: no model, or no stream; what comes is no pair of a name and a tensor. If it is the first that comes,
            or stands in a dict or list, the rollout is as it was.

    Warns:
        UserWarning: the ``state_dict()`` of a trainer that holds its scales, as far as it came as it was made.

    Activation scales that come along replace the static ones; a scale of a rollout that uses none is ignored, and so
    are scales of KV caches. Static residual masks stay as they are: they depend on activations, not on weights. They
    age as the model learns; ``calibrate`` again, or send a state of ``quant_state_dict``.

    >>> trainer, rollout = (nn.Sequential(nn.Linear(32, 8)) for _ in range(2))
    >>> trainer, rollout = qq.convert(trainer, "w4a16"), qq.convert(rollout, "w4a4_residual")  # doctest: +SKIP
    >>> qq.update_weights(rollout, qq.export_weights(trainer, "modelopt")).layers  # doctest: +SKIP
    1
    """
    if isinstance(named_tensors, nn.Module) and not isinstance(rollout, nn.Module):
        raise TypeError(
            f"update_weights: rollout must be a torch.nn.Module, got {type(rollout).__name__}; the order is "
            "update_weights(rollout, named_tensors)"
        )
    root, conversion = conversion_of(rollout, "update_weights", Mode.W4A4_RESIDUAL)
    if conversion.mode is not Mode.W4A4_RESIDUAL:
        raise ValueError(
            f"update_weights: this model is a trainer (mode '{conversion.mode}'), whose weights load_state_dict "
            "changes; pass a rollout model (mode 'w4a4_residual')"
        )
    require_unwrapped(root, "update_weights")
    made_under = None if contract is None else given_contract(contract, "update_weights")
    if made_under is not None:
        Contract.of_conversion(conversion).require_same(made_under, "update_weights")
    if conversion.sync.running:
        raise RuntimeError(
            "update_weights: another sync of this rollout is under way (in a thread, or in the generator that this one "
            "reads); let it finish first"
        )
    stream = _stream_of(named_tensors)
    plan = sync_plan(root, conversion)
    if metadata is not None:
        expected = _checked_metadata(Ledger(root, conversion, plan, made_under), metadata, strict)
    elif isinstance(named_tensors, Mapping) and made_under is not None:  # all names are known ahead
        items = map(_checked_item, named_tensors.items())
        layouts = ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items)
        _checked_metadata(Ledger(root, conversion, plan, made_under), layouts, strict=False)
    if any(HELD_SCALES in entry for entry in getattr(named_tensors, "_metadata", {}).values()):
        warnings.warn(
            "update_weights: this state_dict is of a trainer that holds its scales (Schedule: frozen, ema), which "
            "masters do not tell: this rollout makes scales of its own and multiplies by other weights than the "
            "trainer; send quads_qat.export_weights(trainer, ...)",
            stacklevel=2,
        )
    state, before, begun = conversion.sync, conversion.sync.broken, False
    state.running = True
    try:
        sync = _Sync(root, conversion, plan, made_under)
        for item in stream:
            name, tensor = _checked_item(item)
            if not begun:  # what is no stream at all breaks nothing
                begun, state.broken = True, "the weights of this rollout are being synced; wait for update_weights"
            if metadata is not None and expected.pop(name, None) != (tensor.dtype, tuple(tensor.shape)):
                raise ValueError(f"update_weights: {name} is not what the metadata announced, once for each name")
            sync.take(name, tensor)
        begun = True
        report = sync.finish(strict)
    except BaseException as error:
        state.broken = before
        if begun:
            state.broken = (
                f"the last weight sync of this rollout failed ({type(error).__name__}: {error}), and its layers may be "
                "of different ages; send all weights again with quads_qat.update_weights"
            )
        raise
    finally:
        state.running = False
    state.broken = before if report.missing else ""
    return report


def _stream_of(named_tensors: Any) -> Iterator[Any]:
    """Its items; those that are at hand are looked at now, before any byte changes."""
    if isinstance(named_tensors, (nn.Module, Tensor, str, bytes)) or not isinstance(named_tensors, Iterable):
        raise TypeError(
            f"update_weights: named_tensors must be (name, tensor) pairs or a dict, got "
            f"{type(named_tensors).__name__}; {_STREAMS}"
        )
    items: Iterable[Any] = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if isinstance(named_tensors, (dict, list, tuple)):
        for item in items:
            _checked_item(item)
    return iter(items)


def _checked_item(item: Any) -> tuple[str, Tensor]:
    name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(
            f"update_weights: named_tensors must yield (name, tensor) pairs, got {type(name).__name__} and "
            f"{type(tensor).__name__}; {_STREAMS}"
        )
    if tensor.is_meta:
        raise ValueError(f"update_weights: {name} is on the meta device and has no values; load the weights first")
    return name, tensor


def _checked_metadata(
    ledger: Ledger, metadata: Metadata, strict: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape), after a rehearsal of the whole sync."""
    announced = {}
    for name, dtype, shape in metadata:
        ledger.enter(name, dtype, tuple(shape))
        announced[name] = dtype, tuple(shape)
    if strict:
        _require_complete(ledger.missing(), ledger.unexpected, "metadata")
    return announced


def _require_complete(missing: list[str], unexpected: list[str], what: str) -> None:
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


def _way_out(missing: list[str], unexpected: list[str]) -> str:
    if any(name.startswith("base_model.model.") or ".lora_" in name for name in unexpected):
        return (
            "these are names of a model with adapters; merge first: `with quads_qat.integrations.peft.merged(model) as "
            "plain:` sync export_weights(plain)"
        )
    if missing:
        return "send the whole model, or pass strict=False"
    return "drop what the rollout has no place for, or pass strict=False, which ignores it"


# ------------------------------------------------------------------------------------------------------------- the sync


class _Sync:
    """Holds what has come until its layer is complete, then changes the layer."""

    def __init__(self, root: nn.Module, conversion: Conversion, plan: SyncPlan, made_under: Contract | None) -> None:
        self.root, self.conversion, self.plan = root, conversion, plan
        self.ledger, self.report = Ledger(root, conversion, plan, made_under), SyncReport()
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
            try:
                q = quantize_master(weight, masters.pop(weight.name), amax)
            except ValueError as error:
                raise ValueError(f"update_weights: {error}") from error
            self._finish_packed(weight, q)

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
        for name in layer:
            new = self.ready.pop(name)
            if isinstance(new, Tensor):
                self.ledger.live[name].copy_(new)
            else:
                weight = self.conversion.weights[name]
                module_of(self.root, weight).load_packed(weight.parameter, new)
        self.report.layers += 1

    @torch.no_grad()
    def finish(self, strict: bool) -> SyncReport:
        """Nothing more comes."""
        self._require_sound_scales()
        self.report.missing, self.report.unexpected = self.ledger.missing(), self.ledger.unexpected
        if strict:
            _require_complete(self.report.missing, self.report.unexpected, "the sync")
            self._require_all_input_scales()
        for name, amaxes in self.input_amaxes.items():
            weight = self.conversion.weights[name]
            module = module_of(self.root, weight)
            if not module.uses_input_amax(weight.parameter):
                continue
            if len(amaxes) < len(self.ledger.parts(name)):
                raise ValueError(f"update_weights: activation scales of {name} came in part; send all or none of them")
            module.set_calibrated(weight.parameter, "input_amax", torch.stack(amaxes).amax())
        return self.report

    def _require_all_input_scales(self) -> None:
        """Activation scales come for every weight that uses one, or for none."""
        if not self.input_amaxes:
            return
        weights = self.conversion.weights.values()
        using = [w.name for w in weights if module_of(self.root, w).uses_input_amax(w.parameter)]
        lacking = [name for name in using if name not in self.input_amaxes]
        if lacking and len(lacking) < len(using):
            raise ValueError(
                f"update_weights: activation scales came for some weights, but not for {lacking[0]} and "
                f"{len(lacking) - 1} more; send all or none of them"
            )


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
