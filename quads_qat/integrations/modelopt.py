"""``AutoModelForCausalLM.from_pretrained`` for NVFP4 checkpoints in the ModelOpt dialect, dense and with experts.

transformers has no loader for ``quant_method: "modelopt"``; importing this module gives it one, through its public
registration (``import quads_qat`` sees to that when transformers is imported). transformers loads what is in high
precision, and places every tensor (``device_map``); codes and scales are read by the code of ``load_rollout``, so the
numbers are the same. That works in two steps: before loading, quantized weights leave the model, so that no tensor of
the checkpoint fits them; what stands for them then is "missing", and gets memory on the right device; after loading, it
is filled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from quads_qat import ops
from quads_qat.checkpoint_plan import DiskWeight, cut
from quads_qat.config import ActivationScale, Dialect, Recipe, ResidualConfig, require_kind
from quads_qat.contract import KEY
from quads_qat.conversion import Weight
from quads_qat.convert import install, install_packed
from quads_qat.formats import FLOATS
from quads_qat.load import joined_biases, rollout_policy
from quads_qat.nvfp4_checkpoint import Checkpoint, by_parameter, read_parameter, read_part, shared_input_amax
from quads_qat.required_tensors import require_tensors
from quads_qat.scale_groups import activation_key
from quads_qat.skeleton import adopt_prefix
from quads_qat.weight_stream import empty_quantized

_UNDECODED = "_undecoded"
_SCALES = (
    r"[._](weight_scale|weight_scale_2|input_scale)$",
    r"\.[qkv]_scale$",
    r"\.prob_scale$",
)


class ModelOptConfig(Mxfp4Config):
    """``quantization_config=`` of ``from_pretrained``: what becomes of a ModelOpt NVFP4 checkpoint.

    It derives from ``Mxfp4Config`` because transformers takes loading options from a fixed list of classes and their
    subclasses; nothing else of that class is used.

    Args:
        dequantize: plain modules with decoded weights, to train or to save; otherwise a rollout model, packed.
        residual: as for :func:`~quads_qat.load.load_rollout`, an object or a dict.
        activation_scale: likewise.
        activation_recipe: likewise.
        weights_only: likewise.
        checkpoint: the entry of config.json.

    Example::

        import quads_qat
        from quads_qat.integrations.modelopt import ModelOptConfig

        config = ModelOptConfig(residual=quads_qat.ResidualConfig(fraction=0.5))
        rollout = AutoModelForCausalLM.from_pretrained("nvfp4", quantization_config=config)
        plain = AutoModelForCausalLM.from_pretrained("nvfp4", quantization_config=ModelOptConfig(dequantize=True))
    """

    def __init__(
        self,
        dequantize: bool = False,
        residual: ResidualConfig | dict[str, Any] | None = None,
        activation_scale: ActivationScale | str | None = None,
        activation_recipe: Recipe | str | None = None,
        weights_only: bool = False,
        **checkpoint: Any,
    ) -> None:
        options = (residual, activation_scale, activation_recipe)
        if (dequantize or weights_only) and any(option is not None for option in options):
            raise ValueError(
                "ModelOptConfig: with dequantize=True or weights_only=True nothing quantizes activations; drop "
                "residual, activation_scale and activation_recipe"
            )
        if not isinstance(residual, dict):
            require_kind("ModelOptConfig", "residual", residual, ResidualConfig)
        super().__init__(dequantize=dequantize)
        self.quant_method: Any = "modelopt"
        self.residual = ResidualConfig(**residual) if isinstance(residual, dict) else residual
        self.activation_scale = None if activation_scale is None else ActivationScale(activation_scale)
        self.activation_recipe = None if activation_recipe is None else Recipe(activation_recipe)
        self.weights_only = weights_only
        self.checkpoint = {key: value for key, value in checkpoint.items() if key != "quant_method"}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What of this object counts when the checkpoint brings its own."""
        names = ("dequantize", "residual", "activation_scale", "activation_recipe", "weights_only")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json."""
        return {"quant_method": "modelopt", **self.checkpoint}


class ModelOptQuantizer(HfQuantizer):
    """Loads the checkpoints; quantizes nothing (``quads_qat.quantize_checkpoint`` does)."""

    requires_calibration = True
    quantization_config: ModelOptConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Without a dtype in config.json, transformers takes the first float tensor's: that may be of a scale."""
        return dtype if dtype in FLOATS else torch.bfloat16

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        if not checkpoint_files:
            raise ValueError(
                "from_pretrained: a ModelOpt NVFP4 checkpoint is read from its directory, in the place of which "
                "state_dict= was given; drop it"
            )
        with torch.device("cpu"):  # transformers is inside its context of the meta device
            self._prepare(model, Path(checkpoint_files[0]).parent)
        return model

    def _prepare(self, model: Any, directory: Path) -> None:
        self.checkpoint = Checkpoint.open(directory)
        if self.checkpoint.dialect is not Dialect.MODELOPT:
            raise ValueError(f"{directory}: config.json says {self.checkpoint.dialect}, not modelopt")
        self.names = self.checkpoint.reader.names()
        adopt_prefix(model, self.names)
        self.conversion, plan = self.checkpoint.plan(model)
        require_tensors(
            self.checkpoint.reader, model, plan.sources
        )  # transformers would make up values, with a warning
        self.parts, self.biases = by_parameter(plan), joined_biases(model, self.checkpoint.reader, plan)
        modules = {weight.module for weight in self.conversion.weights.values()}
        below = tuple(rf"^{re.escape(name)}\." for name in sorted(modules))
        self._ignore(model, "_keys_to_ignore_on_load_unexpected", _SCALES + below)
        if self.quantization_config.dequantize:
            for weight in self.conversion.weights.values():
                _rename(model, weight, weight.parameter, weight.parameter + _UNDECODED)
            biases = (rf"^{re.escape(name)}$" for name in self.biases)
            self._ignore(model, "_keys_to_ignore_on_load_missing", (rf"{_UNDECODED}$", *biases))
        else:
            self._install_empty(model)
            self._ignore(model, "_keys_to_ignore_on_load_missing", below)
        for name in modules:
            parent = model.get_submodule(name.rpartition(".")[0])
            model.get_submodule(name)._is_hf_initialized = True  # there is nothing in it to initialize
            if not parent._parameters and not parent._buffers:  # some initialize what is below them
                parent._is_hf_initialized = True

    def _install_empty(self, model: Any) -> None:
        """Packed modules on meta: the right sizes for a device map, no values yet."""
        asked = self.quantization_config
        activation, residual = rollout_policy(
            self.checkpoint,
            asked.residual,
            asked.activation_scale,
            asked.activation_recipe,
            weights_only=asked.weights_only,
        )
        static = activation is not None and activation.scale is ActivationScale.STATIC
        required = static and not self.checkpoint.weights_only
        self.amaxes = {
            n: shared_input_amax(self.checkpoint, parts, required=required) for n, parts in self.parts.items()
        }
        empty = {n: empty_quantized(model.get_parameter(n).shape, w) for n, w in self.conversion.weights.items()}
        self.shapes = {name: model.get_parameter(name).to("meta") for name in self.conversion.weights}
        install(model, self.conversion)
        install_packed(model, self.conversion, empty, dict.fromkeys(empty), activation, residual)

    def _ignore(self, model: Any, attribute: str, patterns: tuple[str, ...]) -> None:
        setattr(model, attribute, {*(getattr(model, attribute, None) or ()), *patterns})

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError(
                "from_pretrained: NVFP4 weights cannot be split over a device mesh (distributed_config, tp_plan); load "
                "without one"
            )
        model.__dict__.pop("_weight_conversions", None)  # none was used: the names on disk are the default ones
        adopt_prefix(model, self.names)
        for name, parts in self.parts.items():
            weight = self.conversion.weights[name]
            if self.quantization_config.dequantize:
                self._decode(model, weight, parts)
            else:
                self._fill(model, weight, parts)
        for name, bias in self.biases.items():
            parameter = model.get_parameter(name).detach()
            _require_in_memory(parameter, name)
            parameter.copy_(bias)
        if not self.quantization_config.dequantize:
            model.requires_grad_(False)
        elif hasattr(model.config, KEY):  # it would be saved with weights that nothing vouches for
            delattr(model.config, KEY)
        del self.checkpoint, self.parts, self.biases
        return model

    def _fill(self, model: Any, weight: Weight, parts: list[DiskWeight]) -> None:
        module, like = model.get_submodule(weight.module), self.shapes[weight.name]
        device = module.packed(weight.parameter).qdata.device
        _require_in_memory(module.packed(weight.parameter).qdata, weight.name)
        q = read_parameter(self.checkpoint, like, parts)
        module.set_packed(weight.parameter, q.to(device))
        amax = self.amaxes[weight.name]
        self.conversion.observers[activation_key(weight.group)].amax = amax
        module.set_calibrated(weight.parameter, "input_amax", None if amax is None else amax.to(device))

    def _decode(self, model: Any, weight: Weight, parts: list[DiskWeight]) -> None:
        value = model.get_submodule(weight.module)._parameters[weight.parameter + _UNDECODED]
        _require_in_memory(value, weight.name)
        oriented = value.detach().mT if weight.format.transposed else value.detach()
        for part in parts:
            decoded = ops.dequantize(read_part(self.checkpoint, value, part), value.dtype)
            cut(oriented, part.expert, part.rows).copy_(decoded)
        _rename(model, weight, weight.parameter + _UNDECODED, weight.parameter)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """``save_pretrained`` would write buffers that no engine knows."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights are not; with ``dequantize=True`` the model is a plain one."""
        return False


def _rename(model: nn.Module, weight: Weight, old: str, new: str) -> None:
    """Call a parameter otherwise, in its place among the others."""
    module = model.get_submodule(weight.module)
    renamed = {new if name == old else name: p for name, p in module._parameters.items()}
    module._parameters.clear()
    module._parameters.update(renamed)


def _require_in_memory(tensor: Tensor, name: str) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"from_pretrained: {name} was offloaded to CPU memory or disk, which NVFP4 weights cannot be; use a "
            "device_map of GPUs alone, or of the CPU alone"
        )


if not {"modelopt"} & {*auto.AUTO_QUANTIZER_MAPPING, *auto.AUTO_QUANTIZATION_CONFIG_MAPPING}:  # else it is another's
    auto.register_quantization_config("modelopt")(ModelOptConfig)
    auto.register_quantizer("modelopt")(ModelOptQuantizer)
