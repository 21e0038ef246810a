"""Opt-in repair of transformers: load the experts of compressed-tensors NVFP4 checkpoints with their global scale.

The fault (transformers issue #48371, fix proposed in pull request #48372; seen in 5.23 and 5.24). A checkpoint holds a
set of tensors for each expert, ``experts.E.down_proj.{weight_packed, weight_scale, weight_global_scale}``; the model
holds one 3-D parameter. ``CompressedTensorsDequantize.convert`` in ``transformers.integrations.compressed_tensors``
decodes the experts before they are merged. It receives all three lists, but hands only the first two to the compressor:
every expert weight comes out ``weight_global_scale`` times too large, and no key is missing, unexpected or logged.
Dense layers do not take this path.

Transformers never quantizes the activations of fused experts, not even for a W4A4 checkpoint: compressed-tensors wraps
modules, a fused expert is a slice of a parameter, and its ``input_global_scale`` is reported as unexpected.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_active: list["Undo"] = []  # the patch stays in place until the last of these is undone


class Undo:
    """What ``patch_transformers`` did, and the way back: call ``undo()``, or use it in a ``with`` statement.

    Attributes:
        needed: False if this transformers has no fault to repair; then nothing was changed.
    """

    def __init__(self, operation: Any = None, original: Callable | None = None):
        self.needed = operation is not None
        self._operation, self._original = operation, original

    def undo(self) -> None:
        """Restore the original, once every other ``Undo`` is undone too. A second call does nothing."""
        if self in _active:
            _active.remove(self)
            if not _active:
                self._operation.convert = self._original

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Undo(needed={self.needed}, active={self in _active})"


def patch_transformers() -> Undo:
    """Hand fused experts their ``weight_global_scale`` when a compressed-tensors NVFP4 MoE checkpoint is loaded.

    Replaces one function, ``CompressedTensorsDequantize.convert``, and only for experts that have a global scale; any
    other call goes to the original. Works by default and with ``CompressedTensorsConfig(dequantize=True)``, for W4A16
    and W4A4: logits equal ``load_model``'s for W4A16; for W4A4, transformers also quantizes the inputs of dense
    linears unless it dequantizes. Calls may be nested. Whether the fault is there is found out by decoding one tiny
    expert::

        with patch_transformers():
            model = AutoModelForCausalLM.from_pretrained(path)

    Returns:
        An ``Undo``; its ``needed`` is False if transformers decodes experts correctly; then nothing was changed.

    Raises:
        ImportError: transformers or compressed-tensors is not installed.
        RuntimeError: transformers decodes experts in a way that this patch does not know. Nothing was changed.
    """
    for package in ("transformers", "compressed-tensors"):
        if find_spec(package.replace("-", "_")) is None:
            raise ImportError(f"patch_transformers: needs {package}, which is not installed; pip install {package}")
    if _active:
        undo = Undo(_active[0]._operation, _active[0]._original)
    else:
        operation = _operation()
        if _decodes_exactly(operation):
            return Undo()
        undo = Undo(operation, operation.convert)
        operation.convert = _with_global_scale(operation.convert)
    _active.append(undo)
    return undo


def _with_global_scale(original: Callable) -> Callable:
    """The replacement for ``CompressedTensorsDequantize.convert``."""

    @functools.wraps(original)
    def convert(
        self: Any,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # Keys of a dense module are bare names; those of experts are patterns: "mlp.experts.*.up_proj.weight_packed".
        if not any(name.endswith(".weight_global_scale") for name in input_dict):
            return original(self, input_dict, source_patterns, target_patterns, full_layer_name, **kwargs)
        from compressed_tensors.compressors import BaseCompressor
        from transformers.integrations.compressed_tensors import get_experts_scheme

        config = self.hf_quantizer.compressor.quantization_config
        scheme = self.scheme or get_experts_scheme(config)
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        decoded = {}
        for key in [name for name in input_dict if name.endswith(".weight_packed")]:
            prefix = key.removesuffix("weight_packed")
            stored = {name.removeprefix(prefix): t for name, t in input_dict.items() if name.startswith(prefix)}
            decoded[key] = _decode_experts(compressor, scheme, stored, prefix)
        return decoded

    return convert


def _decode_experts(compressor: Any, scheme: Any, stored: dict[str, list[Tensor]], prefix: str) -> Tensor:
    """Decode ``stored``, one list entry per expert, to [E, N, K]: what transformers does, with every stored tensor."""
    counts = {name: len(tensors) for name, tensors in stored.items()}
    if "weight_global_scale" not in stored or len(set(counts.values())) != 1:
        raise ValueError(
            f"patch_transformers: every expert of {prefix}* needs one weight_packed, weight_scale and "
            f"weight_global_scale, got {counts}; if the checkpoint is complete, load it without a tp or ep plan"
        )
    out = None
    for i, tensors in enumerate(zip(*stored.values(), strict=True)):
        weight = compressor.decompress(dict(zip(stored, tensors, strict=True)), scheme)["weight"]
        if out is None:  # filled in place: a list of experts plus their stack would take twice the memory
            out = weight.new_empty((len(stored["weight_packed"]), *weight.shape))
        out[i] = weight
    assert out is not None
    return out


def _operation() -> Any:
    """The class whose ``convert`` decodes experts. Raises RuntimeError if transformers has no such class."""
    try:
        from transformers.integrations.compressed_tensors import CompressedTensorsDequantize, get_experts_scheme  # noqa: F401
    except ImportError as error:
        raise _unknown_layout("CompressedTensorsDequantize or get_experts_scheme is missing") from error
    return CompressedTensorsDequantize


def _decodes_exactly(operation: Any) -> bool:
    """Decode one expert, code 1.0 * block scale 1.0 / global scale 2.0: 0.5 is right, 1.0 is the fault of #48371."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    name, format = "mlp.experts.*.down_proj.", "nvfp4-pack-quantized"
    stored = {
        name + "weight_packed": [torch.full((1, 8), 0x22, dtype=torch.uint8)],
        name + "weight_scale": [torch.ones(1, 1).to(torch.float8_e4m3fn)],
        name + "weight_global_scale": [torch.full((1,), 2.0)],
    }
    config = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme("NVFP4A16", ["Linear"])}, format=format)
    quantizer = SimpleNamespace(compressor=SimpleNamespace(quantization_config=config))
    model = SimpleNamespace(get_parameter=lambda _: torch.empty(0, dtype=torch.bfloat16))
    try:
        result = operation(quantizer).convert(stored, list(stored), ["mlp.experts.down_proj"], "x", model=model)
        (weight,) = next(iter(result.values()))
        values = set(weight.flatten().tolist())
    except Exception as error:
        raise _unknown_layout(f"decoding a test expert failed: {error!r}") from error
    if values == {0.5}:
        return True
    if values != {1.0}:
        raise _unknown_layout(f"a test expert of value 0.5 decodes to {sorted(values)}")
    serialized = getattr(CompressedTensorsHfQuantizer, "serialized_names", None)
    if not isinstance(serialized, dict) or "weight_global_scale" not in serialized.get("weight", ()):
        raise _unknown_layout("weight_global_scale is not collected from the checkpoint")
    return False


def _unknown_layout(why: str) -> RuntimeError:
    from transformers import __version__

    return RuntimeError(
        f"patch_transformers: transformers {__version__} is not laid out as this patch expects ({why}), so nothing was "
        f"changed; it is known to work with transformers 5.23 and 5.24. Install one of these, or load the checkpoint "
        f"with quads_qat.load_model, which does not use this code"
    )
