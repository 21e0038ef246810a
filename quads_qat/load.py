"""Import: NVFP4 checkpoints of either dialect into rollout models or BF16 models."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, names, ops
from quads_qat.checkpoint_plan import Assembly, DiskWeight, Plan, cut, disk_plan, is_transposed_stack
from quads_qat.config import ActivationFormat, ActivationScale, Dialect, Recipe, ResidualConfig
from quads_qat.contract import KEY, Contract, RolloutPolicy, given_contract
from quads_qat.conversion import Conversion, select
from quads_qat.convert import install, install_packed
from quads_qat.experts import layout_of
from quads_qat.formats import BLOCK_SIZE
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import activation_key
from quads_qat.skeleton import skeleton


@dataclass
class Checkpoint:
    """An opened NVFP4 checkpoint.

    Attributes:
        reader: its tensors.
        dialect: how they are named.
        weights_only: a W4A16 checkpoint.
        recipe: how codes decode; from the ``quads_qat`` entry of config.json, else the dialect's usual writer.
        contract: the ``quads_qat`` entry of config.json; None if others wrote it.
        renamed: weight of the model -> its name here, where the writer had names of its own.
    """

    reader: checkpoint_io.Reader
    dialect: Dialect
    weights_only: bool
    recipe: Recipe
    contract: Contract | None = None
    renamed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a directory.

        Raises:
            ValueError: no NVFP4 checkpoint, a contract that cannot be read or contradicts the rest of config.json, or
                shards are missing or damaged.
        """
        reader = checkpoint_io.Reader(path)
        dialect, weights_only = dialects.parse_config(_with_legacy_config(reader), str(path))
        _require_own_names(reader, dialect)
        if KEY not in reader.config:
            return cls(reader, dialect, weights_only, dialects.FOREIGN_RECIPES[dialect][0])
        contract = Contract.from_json(reader.config[KEY], str(path))
        if not dialects.carries(dialect, contract.recipe):
            raise ValueError(
                f"{path}: recipe '{contract.recipe}' does not go with the {dialect} dialect; config.json was changed"
            )
        return cls(reader, dialect, weights_only, contract.recipe, contract)

    @property
    def foreign(self) -> bool:
        """Others wrote it: its recipe is known up to what decodes alike."""
        return self.contract is None

    def quantized(self) -> list[str]:
        """BF16 names (``x.weight`` or a 3-D ``x.gate_up_proj``) of all quantized weights, by the tensor names alone."""
        found = (re.fullmatch(r"(.*)([._])weight_(scale|scale_2|global_scale|packed)", n) for n in self.reader.names())
        return list(dict.fromkeys(m[1] + (".weight" if m[2] == "." else "") for m in found if m))

    def quantized_as(self, expected: Collection[str]) -> set[str]:
        """:meth:`quantized` in the names that the model ``expected``; fills ``renamed``."""
        on_disk = set(self.quantized())
        self.renamed = {_of_mixtral(n): n for n in on_disk.difference(expected) if _of_mixtral(n) in expected}
        return on_disk - set(self.renamed.values()) | self.renamed.keys()

    def read(self, name: str, *, transposed: bool | None = None) -> NVFP4Tensor:
        """One quantized weight by its BF16 name, blocks along the last dim.

        Raises:
            ValueError: a missing tensor or a scale that is missing, NaN, zero or negative.
        """
        tensors = {n: self.reader.get(n) for n in self.tensor_names(name).weight if n in self.reader}
        stack = not name.endswith(".weight") if transposed is None else transposed
        here = self.renamed.get(name, name)
        q = dialects.read(here, tensors, self.dialect, self.recipe, transposed=stack)
        if self.recipe is Recipe.ALIGNED and math.frexp(q.per_tensor_scale.item())[0] != 0.5:
            raise ValueError(
                f"{self.tensor_names(name).scale} must be a power of two, as the recipe 'aligned' in config.json makes "
                f"it, got {tensors[self.tensor_names(name).scale].item()}; the tensor or config.json was changed"
            )
        return q

    def tensor_names(self, name: str) -> dialects.TensorNames:
        """What the tensors of a quantized weight are called here."""
        return dialects.tensor_names(self.renamed.get(name, name), self.dialect)

    def input_amax(self, name: str) -> Tensor | None:
        """The amax that the weight's activation scale stands for, [] float32; None if there is no such scale."""
        scale_name = self.tensor_names(name).input_scale
        if scale_name not in self.reader:
            return None
        return dialects.amax_of_input_scale(scale_name, self.reader.get(scale_name), self.dialect)

    def plan(self, model: nn.Module) -> tuple[Conversion, Plan]:
        """Which parameters of ``model`` (a skeleton) are quantized in this checkpoint, and where they are.

        Raises:
            ValueError: nothing is, some parts of a parameter are and others not, or a quantized tensor has no place.
        """
        candidates = [name for name, module in model.named_modules() if _can_be_packed(module)]
        try:
            every = disk_plan(model, select(model, recipe=self.recipe, only=candidates), self.dialect)
        except names.DiskLayoutError as error:  # merged on disk: those cannot be quantized there
            merged = {parameter.rpartition(".")[0] for parameter in error.parameters}
            candidates = [name for name in candidates if name not in merged]
            every = disk_plan(model, select(model, recipe=self.recipe, only=candidates), self.dialect)
        expected = {disk.name for disk in every.weights}
        on_disk = self.quantized_as(expected)
        self._require_placed(model, on_disk - expected)
        present: dict[str, list[bool]] = {}
        for disk in every.weights:
            present.setdefault(disk.weight.module, []).append(disk.name in on_disk)
        for module, found in present.items():
            if any(found) and not all(found):
                raise ValueError(
                    f"{self.reader.path}: {module} is quantized only in part ({sum(found)} of {len(found)} tensors)"
                )
        rules = () if self.contract is None else self.contract.rules
        quantized = [m for m, found in present.items() if all(found)]
        conversion = select(model, recipe=self.recipe, only=quantized, groups=rules)
        if self.contract is not None:
            conversion.scope = self.contract.scope
        return conversion, disk_plan(model, conversion, self.dialect)

    def _require_placed(self, model: nn.Module, unplaced: set[str]) -> None:
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # MTP layers, say
        lost = [name for name in sorted(unplaced) if not any(re.search(pattern, name) for pattern in ignored)]
        if lost:
            raise ValueError(
                f"{self.reader.path}: {lost[0]} is quantized, but {type(model).__name__} has no such weight"
            )


def _require_own_names(reader: checkpoint_io.Reader, dialect: Dialect) -> None:
    """The tensors are named as config.json claims."""
    of_others = {Dialect.MODELOPT: r"\.weight_packed$", Dialect.COMPRESSED_TENSORS: r"[._]weight_scale_2$"}[dialect]
    found = next((name for name in reader.names() if re.search(of_others, name)), None)
    if found is not None:
        other = next(d for d in Dialect if d is not dialect)
        raise ValueError(
            f"{reader.path}: config.json says {dialect}, but {found} is a name of the {other} dialect; one of the two "
            "is of another checkpoint"
        )


def _with_legacy_config(reader: checkpoint_io.Reader) -> dict[str, Any]:
    """config.json; where it says nothing of quantization, early Model-Optimizer exports do in hf_quant_config.json."""
    legacy = reader.path / "hf_quant_config.json"
    if reader.config.get("quantization_config") is not None or not legacy.exists():
        return reader.config
    return reader.config | {"quantization_config": {"quant_method": "modelopt", **checkpoint_io.read_json(legacy)}}


def _of_mixtral(name: str) -> str:
    """llm-compressor calls the experts' w1, w3, w2 by other names."""
    names_ = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return re.sub(r"(?<=\.)(gate|up|down)_proj(?=\.weight$)", lambda found: names_[found[0]], name)


def _can_be_packed(module: nn.Module) -> bool:
    if type(module) is nn.Linear:
        return module.in_features % BLOCK_SIZE == 0
    layout = layout_of(module)
    if layout is None:
        return False
    k = -2 if layout.transposed else -1
    return all(module._parameters[p].shape[k] % BLOCK_SIZE == 0 for p in layout.parameters)  # pyright: ignore[reportOptionalMemberAccess]


# --------------------------------------------------------------------------------------------------------------- models


def load_rollout(
    path: str | Path,
    *,
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
    activation_recipe: Recipe | str | None = None,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    contract: Contract | str | Path | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A rollout model from an NVFP4 checkpoint: packed weights as they are on disk, never requantized.

    Args:
        path: directory of either dialect.
        residual: what is compensated. None: what config.json records; where it records nothing, nothing quantizes the
            activations of a W4A16 checkpoint (weight-only), and half of the channels per token are compensated for a
            W4A4 one. ``fraction=0`` is naive W4A4.
        activation_scale: ``per_token``, ``per_tensor`` or ``static`` (the checkpoint's input scales; those of a W4A16
            checkpoint wait for ``calibrate``). None: what config.json records, else ``per_token``.
        activation_recipe: arithmetic of the activations. ALIGNED rounds an imported scale up to a power of two. None:
            what config.json records, else ALIGNED.
        weights_only: leave activations alone (W4A16 inference), whatever the checkpoint says.
        dtype: of what is not quantized; None: the config's.
        contract: what the checkpoint must have been made under, e.g. ``qq.contract_of(trainer)``: the same recipe and
            scale groups, and, where it names a rollout policy, that one (an explicit argument above stands for it).
        trust_remote_code: run the model code that the checkpoint brings, where transformers has none.

    Returns:
        The model of config.json's architecture, in eval mode, on the CPU.

    Raises:
        ValueError: a missing or damaged file, tensor or scale, an unknown architecture, another contract.
    """
    checkpoint = Checkpoint.open(path)
    if weights_only and (residual or activation_scale or activation_recipe):
        raise ValueError(
            "load_rollout: weights_only=True leaves activations alone; drop it, or drop residual, activation_scale and "
            "activation_recipe"
        )
    activation, residual = rollout_policy(
        checkpoint, residual, activation_scale, activation_recipe, contract, weights_only=weights_only
    )
    model = skeleton(path, checkpoint.reader.names(), dtype, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    static = activation is not None and activation.scale is ActivationScale.STATIC
    packed, amaxes = {}, dict.fromkeys(conversion.weights)
    for parameter, disks in by_parameter(plan).items():
        packed[parameter] = read_parameter(checkpoint, model.get_parameter(parameter), disks)
        required = static and not checkpoint.weights_only
        amaxes[parameter] = shared_input_amax(checkpoint, disks, required=required)
        conversion.observers[activation_key(disks[0].weight.group)].amax = amaxes[parameter]
    _fill_rest(model, checkpoint.reader, plan)
    install(model, conversion)
    install_packed(model, conversion, packed, amaxes, activation, residual)
    return _finish(model, path)


def rollout_policy(
    checkpoint: Checkpoint,
    residual: ResidualConfig | None,
    activation_scale: ActivationScale | str | None,
    activation_recipe: Recipe | str | None,
    contract: Contract | str | Path | None = None,
    *,
    weights_only: bool = False,
) -> tuple[ActivationFormat | None, ResidualConfig | None]:
    """What a rollout of ``checkpoint`` does with activations; arguments as for :func:`load_rollout`.

    Raises:
        ValueError: the checkpoint was made under another contract than the one given.

    Warns:
        UserWarning: a W4A4 checkpoint records nothing about rollouts, and neither does the caller say what is
            compensated: says what this one does.
    """
    recipe = None if activation_recipe is None else Recipe(activation_recipe)
    scale = None if activation_scale is None else ActivationScale(activation_scale)
    chosen = None if checkpoint.contract is None else checkpoint.contract.rollout
    unsaid = chosen is None and residual is None and not checkpoint.weights_only
    if chosen is None and (residual is not None or scale is not None or not checkpoint.weights_only):
        chosen = RolloutPolicy()
    if contract is not None:
        contract = given_contract(contract, str(checkpoint.reader.path))
        require_contract(checkpoint, contract)
        explicit = residual is not None or scale is not None or recipe is not None
        if not explicit and contract.rollout is not None and chosen != contract.rollout:
            raise ValueError(
                f"{checkpoint.reader.path}: another contract: rollouts of this checkpoint do {chosen}, expected "
                f"{contract.rollout}; pass residual= and activation_scale= to override what is recorded"
            )
    if chosen is not None:
        activation = ActivationFormat(scale=scale or chosen.activation.scale, recipe=recipe or chosen.activation.recipe)
        chosen = RolloutPolicy(activation=activation, residual=residual or chosen.residual)
    if unsaid and chosen is not None and not weights_only:
        warnings.warn(
            f"{checkpoint.reader.path} does not record what rollouts do with activations; this one takes their scale "
            f"{chosen.activation.scale} and compensates {chosen.residual.fraction:.0%} of the channels per "
            f"{chosen.residual.scope}. Pass residual=, or record it: residual= at export",
            stacklevel=3,
        )
    return (None, None) if chosen is None or weights_only else (chosen.activation, chosen.residual)


def require_contract(checkpoint: Checkpoint, given: Contract | str | Path) -> None:
    """Raise ValueError if the weights were made with another recipe or other scale groups; activations never count."""
    contract = given_contract(given, str(checkpoint.reader.path))
    if checkpoint.contract is not None:
        contract.require_same(checkpoint.contract, str(checkpoint.reader.path))
    elif contract.recipe not in dialects.FOREIGN_RECIPES[checkpoint.dialect]:
        made = " or ".join(f"'{recipe}'" for recipe in dialects.FOREIGN_RECIPES[checkpoint.dialect])
        raise ValueError(
            f"{checkpoint.reader.path}: another contract: recipe: '{contract.recipe}' against {made} (others wrote it)"
        )


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    *,
    contract: Contract | str | Path | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A plain model with the dequantized weights of an NVFP4 checkpoint of either dialect, for any transformers code.

    ``dtype`` None: the config's. With Recipe.ALIGNED, bf16 holds every weight exactly. In eval mode; parameters take
    gradients, so the model can be converted and trained on. Weights that had rounded to -0.0 are +0.0 after another
    conversion, as the recipes have it: the same values, another sign of zero. ``contract`` and
    ``trust_remote_code`` as for :func:`load_rollout`.
    """
    checkpoint = Checkpoint.open(path)
    if contract is not None:
        require_contract(checkpoint, contract)
    model = skeleton(path, checkpoint.reader.names(), dtype, trust_remote_code=trust_remote_code)
    _, plan = checkpoint.plan(model)
    for parameter, disks in by_parameter(plan).items():
        meta = model.get_parameter(parameter)
        value = torch.empty(meta.shape, dtype=meta.dtype)
        oriented = value.mT if disks[0].weight.format.transposed else value
        for disk in disks:
            q = read_part(checkpoint, meta, disk)
            cut(oriented, disk.expert, disk.rows).copy_(ops.dequantize(q, meta.dtype))
        _assign(model, parameter, value)
    _fill_rest(model, checkpoint.reader, plan)
    return _finish(model, path)


def read_part(checkpoint: Checkpoint, parameter: Tensor, disk: DiskWeight) -> NVFP4Tensor:
    """One quantized weight, if it has the shape of its place in ``parameter`` (on meta will do)."""
    q = checkpoint.read(disk.name, transposed=disk.stored_transposed)
    expected = cut(parameter.mT if disk.weight.format.transposed else parameter, disk.expert, disk.rows).shape
    if q.shape != expected:
        raise ValueError(
            f"{checkpoint.reader.path}: {disk.name} must decode to shape {list(expected)}, got {list(q.shape)}"
        )
    return q


def read_parameter(checkpoint: Checkpoint, parameter: Tensor, disks: list[DiskWeight]) -> NVFP4Tensor:
    """All of a parameter's codes and scales, [(E,) N, K], from its parts on disk."""
    weight = disks[0].weight
    assembly = Assembly(weight, (parameter.mT if weight.format.transposed else parameter).shape)
    for disk in disks:
        assembly.add(disk, read_part(checkpoint, parameter, disk))
    return assembly.finish()


def by_parameter(plan: Plan) -> dict[str, list[DiskWeight]]:
    """Parts by the parameter in memory that they belong to."""
    parameters: dict[str, list[DiskWeight]] = {}
    for disk in plan.weights:
        parameters.setdefault(disk.weight.name, []).append(disk)
    return parameters


def shared_input_amax(checkpoint: Checkpoint, disks: list[DiskWeight], *, required: bool) -> Tensor | None:
    """The largest of the parts' activation amaxes: what engines use for fused weights."""
    amaxes = [checkpoint.input_amax(disk.name) for disk in disks]
    present = [a for a in amaxes if a is not None]
    if required and len(present) < len(amaxes):
        name = checkpoint.tensor_names(disks[amaxes.index(None)].name).input_scale
        raise ValueError(
            f"{checkpoint.reader.path}: {name} is missing, and activation_scale='static' needs it; use "
            "activation_scale='per_token', or export with activations='observed'"
        )
    return torch.stack(present).amax() if present else None


# ----------------------------------------------------------------------------------------- what stays in high precision


def _fill_rest(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> None:
    """Read everything that is not quantized into the skeleton."""
    for name, value in rest_from_disk(model, reader, plan):
        _assign(model, name, value)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # pyright: ignore[reportCallIssue]


def rest_from_disk(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """(name in memory, value) of every parameter and buffer that the plan does not quantize.

    Raises:
        ValueError: a tensor is missing.
    """
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    split = joined_biases(model, reader, plan)
    yield from split.items()
    found_otherwise = {*split, *(disk.weight.name for disk in plan.weights)}
    rest = [n for n in names.state_dict_names(model) if n not in found_otherwise]
    matrices = {n: is_transposed_stack(model, n) for n in rest if n in parameters and state[n].ndim in (2, 3)}
    try:
        disks = names.disk_tensors(model, matrices)
    except names.DiskLayoutError as error:
        matrices = {n: transposed for n, transposed in matrices.items() if n not in error.parameters}
        disks = names.disk_tensors(model, matrices)
    for name, of_parameter in itertools.groupby(disks, key=lambda disk: disk.parameter):
        value = torch.empty_like(state[name], device="cpu")
        for disk in of_parameter:
            tensor = reader.get(disk.name)
            tensor = tensor.mT if disk.transposed else tensor
            _fill(disk.select(value, transposed_memory=matrices[name]), tensor, f"{reader.path}: {disk.name}")
        yield name, value
    by_element = [n for n in rest if n not in matrices]
    values = {n: torch.empty_like(state[n], device="cpu", memory_format=torch.contiguous_format) for n in by_element}
    for elements in names.disk_elements(model, by_element):
        elements.scatter(reader.get(elements.name), values)
    yield from values.items()


def joined_biases(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> dict[str, Tensor]:
    """Name in memory -> the bias [E, N] of a stack whose experts are apart on disk, and their biases with them."""
    joined: dict[str, Tensor] = {}
    for bias in plan.biases:
        value = joined.setdefault(bias.parameter, torch.empty_like(model.get_parameter(bias.parameter), device="cpu"))
        _fill(bias.of_source(value), reader.get(bias.name), f"{reader.path}: {bias.name}")
    return joined


def _fill(place: Tensor, tensor: Tensor, name: str) -> None:
    if place.shape != tensor.shape:  # copy_ would broadcast
        raise ValueError(f"{name} must have shape {list(place.shape)}, got {list(tensor.shape)}")
    names.require_float(name, tensor.dtype, place.dtype)
    place.copy_(tensor)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
    else:
        module._buffers[leaf] = value


def _finish(model: nn.Module, path: str | Path) -> nn.Module:
    left = [name for name, p in model.named_parameters() if p.is_meta]
    if left:
        raise ValueError(f"{path}: the checkpoint has no values for {left[0]} and {len(left) - 1} more parameters")
    if (Path(path) / "generation_config.json").exists() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(str(path))  # pyright: ignore[reportArgumentType]
        except Exception as error:  # whatever transformers raises of it
            raise ValueError(
                f"{path}: generation_config.json cannot be read ({error}); correct it or remove it"
            ) from error
    return model.eval()
