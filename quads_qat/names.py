"""Names of weights: from a parameter in memory to the tensors of the original checkpoint on disk.

transformers >= 5 loads the per-expert matrices of a checkpoint into fused 3-D parameters, and ``save_pretrained``
undoes that: ``revert_weight_conversion(model, state_dict)`` in ``transformers/core_model_loading.py`` applies the
conversions that a model was loaded with (else the defaults in ``conversion_mapping.py``) backwards. Those rules differ
per architecture and release, so this module copies none of them; it *probes* them. In place of each weight it sends a
small int64 tensor through that function, with numbers that tell (parameter, expert, row) apart, and reads from the
numbers that come back which disk tensor holds what:

    gate_up_proj [2, 4, 2]                  [[[1, 2], [3, 4], [5, 6], [7, 8]], [[9, 10], [11, 12], [13, 14], [15, 16]]]
    -> experts.1.up_proj.weight [2, 2]      [[13, 14], [15, 16]] = expert 1, rows 2:4

Load-bearing details:
- K is collapsed to 2, not to 1: two numbers per row tell a swap of N and K even when N = 1, and betray a cut in K.
- Some operations look at the model's parameters (``Transpose(check_dims=True)`` compares shapes), so they get a
  stand-in model whose probed parameters have the shapes of the probes.
- Weights that nobody asks for are sent too, as zeros: without its siblings, a weight that is merged with them on disk
  would seem to be alone there.
- Every answer is checked: ``DiskTensor.select`` must cut from the probe exactly what came back, and every row of a
  parameter must come back once. Anything else is a ``DiskLayoutError``.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_BATCH = 1 << 22  # int64 numbers sent through the conversion at once: 32 MiB


class DiskLayoutError(ValueError):
    """Weights that are no slices of rows on disk: merged with others, or permuted. ``parameters`` has their names."""

    def __init__(self, parameters: Iterable[str], why: str) -> None:
        self.parameters = tuple(parameters)
        more = f" and {len(self.parameters) - 8} more" if len(self.parameters) > 8 else ""
        super().__init__(
            f"disk_tensors: every disk tensor must be a slice of rows of one weight, but {why}: "
            f"{', '.join(self.parameters[:8])}{more}; leave them unquantized, disk_state can convert them"
        )


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """One tensor of the checkpoint, and the part of a parameter that it holds."""

    name: str  #: on disk, e.g. "model.layers.0.mlp.experts.3.gate_proj.weight"
    parameter: str  #: in memory, e.g. "model.layers.0.mlp.experts.gate_up_proj"
    expert: int | None  #: index into dim 0 of a 3-D parameter; None = all of it
    rows: slice | None  #: rows of the out dim N (with a step where layouts interleave); None = all
    transposed: bool  #: on disk the last two dims are swapped against memory

    def select(self, weight: Tensor, *, transposed_memory: bool = False) -> Tensor:
        """Cut this part out of the parameter, or out of its codes or block scales; a view.

        Args:
            weight: [N, *] or [E, N, *]; with ``transposed_memory`` [*, N] or [E, *, N]. The dim * is never indexed.
            transposed_memory: Whether N is the last dim of ``weight``.

        Returns:
            The view, in the layout of ``weight``: if ``transposed``, its ``.mT`` is what is on disk.

        Example:
            >>> up = DiskTensor("experts.1.up_proj.weight", "experts.gate_up_proj", 1, slice(2, 4), False)
            >>> up.select(torch.zeros(3, 4, 16)).shape
            torch.Size([2, 16])
        """
        matrix = weight if self.expert is None else weight[self.expert]
        if self.rows is None:
            return matrix
        return matrix[..., self.rows] if transposed_memory else matrix[..., self.rows, :]


def disk_tensors(model: nn.Module, parameters: Mapping[str, bool]) -> list[DiskTensor]:
    """Where weights are on disk.

    Args:
        model: Only read, on any device (``meta`` too).
        parameters: Name of a weight [N, K] or [E, N, K] -> whether it is transposed in memory ([K, N], [E, K, N]).

    Returns:
        The disk tensors, by parameter in the order asked, then by expert, then by row.

    Raises:
        DiskLayoutError: (a ValueError) A weight is no slice of rows on disk.

    Example:
        >>> disk_tensors(nn.Sequential(nn.Linear(16, 4)), {"0.weight": False})
        [DiskTensor(name='0.weight', parameter='0.weight', expert=None, rows=None, transposed=False)]
    """
    found: dict[str, list[DiskTensor]] = {name: [] for name in parameters}
    unmapped: set[str] = set()
    for probes, sent in _batches(model, parameters):
        try:
            came_back = _revert(model, sent, pretend=sent)
        except Exception as error:  # whatever one of transformers' operations raises
            raise DiskLayoutError(
                (p.parameter for p in probes), f"transformers cannot convert these ({error})"
            ) from error
        firsts = [probe.first for probe in probes]
        missing = {probe.parameter: probe.values.numel() for probe in probes}
        for name, values in came_back.items():
            if not values.numel():  # no experts, say: it holds nothing of any weight
                continue
            owner = bisect_right(firsts, int(values.flatten()[0])) - 1
            tensor = _decode(name, values, probes[owner]) if owner >= 0 else None
            if tensor is not None:
                found[tensor.parameter].append(tensor)
                missing[tensor.parameter] -= values.numel()
        unmapped.update(name for name, left in missing.items() if left)
    if unmapped:
        raise DiskLayoutError(
            (n for n in parameters if n in unmapped), "these are merged with others or have permuted rows"
        )
    by_row = [sorted(ts, key=lambda t: (t.expert or 0, t.rows.start if t.rows else 0)) for ts in found.values()]
    return [tensor for tensors in by_row for tensor in tensors]


@dataclass(frozen=True, slots=True)
class DiskElements:
    """One tensor of the checkpoint, element by element: for weights that are no slices of rows there."""

    name: str  #: on disk
    shape: torch.Size  #: on disk
    #: name in memory -> (flat positions on disk, flat positions in memory), int64; elements of no weight are padding
    parts: Mapping[str, tuple[Tensor, Tensor]]

    def scatter(self, tensor: Tensor, into: Mapping[str, Tensor]) -> None:
        """Put the elements of ``tensor``, as it is on disk, where they belong in the contiguous tensors ``into``."""
        if tensor.shape != self.shape:
            raise ValueError(f"{self.name} must have shape {list(self.shape)}, got {list(tensor.shape)}")
        flat = tensor.reshape(-1)
        for name, (there, here) in self.parts.items():
            require_float(self.name, tensor.dtype, into[name].dtype)
            into[name].view(-1)[here] = flat[there].to(into[name].dtype)


def require_float(name: str, stored: torch.dtype, needed: torch.dtype) -> None:
    """Raise ValueError if a tensor in high precision is stored as something that a cast would make other numbers of.

    Codes without their scales, say: integers, booleans, complex numbers, floats of 8 bits.
    """
    if needed.is_floating_point and (not stored.is_floating_point or stored.itemsize == 1) and stored != needed:
        raise ValueError(f"{name} must be {needed} or another float of at least 16 bits, got {stored}")


def disk_elements(model: nn.Module, parameters: Iterable[str]) -> Iterator[DiskElements]:
    """Where single elements are on disk: for weights of any rank, merged and permuted ones too, and for buffers.

    It takes 16 bytes for each element of a layer; :func:`disk_tensors` takes almost none.

    Args:
        model: Only read, on any device (``meta`` too).
        parameters: Names of parameters and buffers. Those merged with each other on disk must all be given.

    Raises:
        ValueError: An element is not on disk, or there twice.

    Example:
        >>> next(disk_elements(nn.LayerNorm(2), ["bias"])).parts["bias"]
        (tensor([0, 1]), tensor([0, 1]))
    """
    state = model.state_dict()
    layers: dict[str, list[str]] = {}
    for name in parameters:
        layers.setdefault(_layer(name), []).append(name)
    batch: list[str] = []
    for i, names in enumerate(layers.values()):
        batch += names
        if i + 1 == len(layers) or sum(state[name].numel() for name in batch) > _BATCH:
            yield from _elements_of_batch(model, {name: state[name].shape for name in batch})
            batch = []


def _elements_of_batch(model: nn.Module, shapes: Mapping[str, torch.Size]) -> Iterator[DiskElements]:
    firsts, sent, first = [], {}, 1  # 0 is padding
    for name, shape in shapes.items():
        firsts.append(first)
        sent[name] = torch.arange(first, first + shape.numel(), device="cpu").view(shape)
        first += shape.numel()
    seen = torch.zeros(first, dtype=torch.bool, device="cpu")
    names, found = list(shapes), []
    for on_disk, values in disk_state(model, sent).items():
        flat, parts = values.reshape(-1), {}
        inside = flat[(flat > 0) & (flat < first)]
        doubled = bool(seen[inside].any()) or len(inside.unique()) < len(inside)
        seen[inside] = True
        owners = (torch.bucketize(inside, inside.new_tensor(firsts), right=True) - 1).unique().tolist()
        for owner in owners:
            end = firsts[owner + 1] if owner + 1 < len(firsts) else first
            there = ((flat >= firsts[owner]) & (flat < end)).nonzero().squeeze(-1)
            parts[names[owner]] = there, flat[there] - firsts[owner]
        if doubled:
            raise ValueError(f"disk_elements: every element must be on disk once, but {on_disk} repeats some")
        found.append(DiskElements(on_disk, values.shape, parts))
    lost = [n for n, f in zip(names, firsts, strict=True) if not bool(seen[f : f + shapes[n].numel()].all())]
    if lost:
        raise ValueError(
            f"disk_elements: every element must be on disk, but some of {lost[0]} are not ({len(lost)} such)"
        )
    yield from found


def disk_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors, values and all, to what ``save_pretrained`` would write.

    Args:
        model: Only read, on any device (``meta`` too).
        tensors: Name in memory -> tensor, full size. Weights merged on disk must come together: one layer is enough.

    Returns:
        Name on disk -> tensor, without tied duplicates. It may share memory with ``tensors``.

    Example:
        >>> sorted(disk_state(nn.LayerNorm(4), {"weight": torch.ones(4)}))
        ['weight']
    """
    state = model.state_dict()
    if unknown := sorted(tensors.keys() - state.keys()):
        raise ValueError(f"disk_state: every name must be in model.state_dict(), got {unknown}")
    saved = state_dict_names(model)
    converted = _revert(model, {name: tensors[name] for name in saved if name in tensors})
    # Without its siblings a merged tensor comes out short, silently. The shapes of whole layers show it.
    layers = {_layer(name) for name in tensors}
    metas = {n: torch.empty(state[n].shape, device="meta") for n in saved if _layer(n) in layers}
    shapes = {name: tensor.shape for name, tensor in _revert(model, metas).items()}
    for name, tensor in converted.items():
        if tensor.shape != shapes.get(name):
            raise ValueError(
                f"disk_state: all weights that are merged into {name} {list(shapes.get(name, ()))} must be given in "
                f"one call and in full size, got enough for {list(tensor.shape)}; give those of a whole layer"
            )
    return converted


def disk_layouts(model: nn.Module) -> dict[str, Tensor]:
    """Name on disk -> an empty tensor on meta with its dtype and shape: everything that ``save_pretrained`` writes.

    A model whose tied weights are not tied yet, as in the midst of ``from_pretrained``, will do.

    Example:
        >>> disk_layouts(nn.LayerNorm(4))["bias"].shape
        torch.Size([4])
    """
    state, tied = model.state_dict(), getattr(model, "all_tied_weights_keys", None) or ()
    saved = [name for name in state_dict_names(model) if name not in tied]
    return _revert(model, {name: torch.empty_like(state[name], device="meta") for name in saved})


def names_in_memory(model: nn.Module, on_disk: Iterable[str]) -> dict[str, str]:
    """Name on disk -> the parameter or buffer that transformers loads it into, legacy names and prefixes included.

    A name that belongs to nothing is mapped to one that is not in the model.
    """
    if not _converts(model):
        return {name: name for name in on_disk}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules: list[Any] = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    found = {}
    for name in on_disk:
        new, _ = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, _ = rename_source_key(name, [], [], prefix, state)
        found[name] = new
    return found


def state_dict_names(model: nn.Module) -> list[str]:
    """Names in memory that belong on disk.

    Parameters and persistent buffers, without what ``save_pretrained`` drops: keys that the model never saves, and all
    but one name of tied weights. A module that is not of transformers keeps every name.

    Example:
        >>> state_dict_names(nn.Linear(2, 3))
        ['weight', 'bias']
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if not _converts(model):
        return list(state)
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    # Tied weights show by their storage. That of a sharded or empty tensor says nothing; for a meta tensor transformers
    # compares the parameter objects instead.
    meta = torch.empty(1, device="meta")
    state = {name: t if type(t) is Tensor and t.numel() else meta for name, t in state.items()}
    return list(remove_tied_weights_from_state_dict(state, model))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _Probe:
    parameter: str
    transposed: bool  # in memory N and K are swapped against ``values``
    first: int
    values: Tensor  # [N, 2] or [E, N, 2]: first, first + 1, ...


class _StandIn:
    """The model as conversions see it: with the parameters ``pretend``, and with the classes from before FSDP2."""

    def __init__(self, model: nn.Module, pretend: Mapping[str, Tensor]) -> None:
        self._model, self._pretend = model, pretend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return self._pretend[name] if name in self._pretend else self._model.get_parameter(name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            mro = type(module).__mro__
            if mro[1].__name__ == "FSDPModule":  # mro[0] is made by FSDP2, unknown to transformers, which goes by class
                twin = object.__new__(mro[2])
                twin.__dict__.update(module.__dict__)
                module = twin
            yield name, module


def _layer(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.gate.weight``; weights are merged within a layer only."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


def _batches(model: nn.Module, parameters: Mapping[str, bool]) -> Iterator[tuple[list[_Probe], dict[str, Tensor]]]:
    """Probes of whole layers, and what to send: the probes as they are in memory, and zeros for the other weights."""
    layers: dict[str, list[str]] = {_layer(name): [] for name in parameters}
    others = (name for name, p in model.named_parameters() if p.ndim in (2, 3) and name not in parameters)
    for name in (*parameters, *others):
        if _layer(name) in layers:
            layers[_layer(name)].append(name)
    probes: list[_Probe] = []
    sent: dict[str, Tensor] = {}
    first = 1  # 0 is nothing
    for names in layers.values():
        for name in names:
            shape = list(model.get_parameter(name).shape)
            if name not in parameters:
                sent[name] = torch.zeros(*shape[:-1], 2, dtype=torch.int64, device="cpu")
                continue
            if len(shape) not in (2, 3):
                raise ValueError(f"disk_tensors: a weight must be [N, K] or [E, N, K], got {name} with shape {shape}")
            shape[-2:] = [shape[-1] if parameters[name] else shape[-2], 2]
            values = torch.arange(first, first + torch.Size(shape).numel(), device="cpu").view(shape)
            sent[name] = values.mT.contiguous() if parameters[name] else values
            probes.append(_Probe(name, parameters[name], first, values))
            first += values.numel()
        if first > _BATCH:
            yield probes, sent
            probes, sent, first = [], {}, 1
    if probes:
        yield probes, sent


def _decode(name: str, values: Tensor, probe: _Probe) -> DiskTensor | None:
    """The part of ``probe`` that came back as ``values`` [.., n, 2] or [.., 2, n]; None if it is no slice of rows."""
    if values.ndim not in (2, probe.values.ndim):
        return None
    matrix = values[0] if values.ndim == 3 else values
    k_last = matrix.shape[-1] == 2 and int(matrix[0, 1] - matrix[0, 0]) == 1
    column = matrix[:, 0] if k_last else matrix[0]  # [n]: the even steps
    total, count = probe.values.shape[-2], len(column)
    expert, start = divmod((int(column[0]) - probe.first) // 2, total)
    step = int(column[1] - column[0]) // 2 if count > 1 else 1
    if step < 1:
        return None
    tensor = DiskTensor(
        name=name,
        parameter=probe.parameter,
        expert=expert if values.ndim < probe.values.ndim else None,
        rows=None if count == total else slice(start, min(start + count * step, total), None if step == 1 else step),
        transposed=k_last == probe.transposed,
    )
    return tensor if torch.equal(tensor.select(probe.values), values if k_last else values.mT) else None


def _converts(model: nn.Module) -> bool:
    """Whether it is a model of transformers >= 5, whose ``save_pretrained`` converts. Never imports transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    return int(transformers.__version__.split(".")[0]) >= 5


def _revert(
    model: nn.Module, tensors: dict[str, Tensor], pretend: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What ``save_pretrained`` makes of ``tensors``, as if the model's parameters had the shapes of ``pretend``."""
    if not _converts(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(_StandIn(model, pretend or {}), tensors)  # pyright: ignore[reportArgumentType]
