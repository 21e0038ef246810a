"""The two checkpoint dialects: what a quantized weight is called on disk, and the JSON that announces it.

===================== =================================== ==========================================
of one linear [N, K]  ModelOpt                            compressed-tensors
===================== =================================== ==========================================
codes [N, K/2] uint8  ``.weight``                         ``.weight_packed``
scales [N, K/16] e4m3 ``.weight_scale``                   ``.weight_scale``
per-tensor scale      ``.weight_scale_2`` [], multiplies  ``.weight_global_scale`` [1], **divides**
activation scale      ``.input_scale`` [], multiplies     ``.input_global_scale`` [1], **divides**
===================== =================================== ==========================================

ModelOpt keeps the experts of gpt-oss and llama4 as 3-D tensors [E, K/2, N] named ``<parameter>``,
``<parameter>_weight_scale``, ``<parameter>_weight_scale_2``, ``<parameter>_input_scale``.
Sources: what nvidia-modelopt 0.47.0 and llm-compressor 0.14 / compressed-tensors 0.20.1 write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads_qat.config import Dialect, Recipe
from quads_qat.formats import BLOCK_SIZE, FLOATS, SCALE_RANGE
from quads_qat.qtensor import NVFP4Tensor

_EXPORTABLE = {
    Dialect.MODELOPT: (
        Recipe.ALIGNED,
        Recipe.MODELOPT,
        Recipe.MODELOPT_IEEE,
        Recipe.MODELOPT_STATIC,
        Recipe.MODELOPT_STATIC_IEEE,
    ),
    Dialect.COMPRESSED_TENSORS: (Recipe.ALIGNED, Recipe.LLM_COMPRESSOR),
}
FOREIGN_RECIPES = {
    Dialect.MODELOPT: (
        Recipe.MODELOPT,
        Recipe.MODELOPT_IEEE,
        Recipe.MODELOPT_STATIC,
        Recipe.MODELOPT_STATIC_IEEE,
    ),
    Dialect.COMPRESSED_TENSORS: (Recipe.LLM_COMPRESSOR,),
}
"""What may have made a checkpoint that others wrote; recipes of one dialect decode alike."""


@dataclass(frozen=True)
class TensorNames:
    """Names on disk of one quantized weight."""

    qdata: str
    block_scale: str
    scale: str
    input_scale: str

    @property
    def weight(self) -> tuple[str, str, str]:
        """The three tensors that every quantized weight has."""
        return self.qdata, self.block_scale, self.scale


def tensor_names(name: str, dialect: Dialect) -> TensorNames:
    """Names for the BF16 weight ``name``: ``x.weight``, or a 3-D parameter ``x.gate_up_proj`` (ModelOpt only).

    >>> tensor_names("q_proj.weight", Dialect.COMPRESSED_TENSORS).scale
    'q_proj.weight_global_scale'
    >>> tensor_names("experts.down_proj", Dialect.MODELOPT).scale
    'experts.down_proj_weight_scale_2'
    """
    if not name.endswith(".weight"):
        assert dialect is Dialect.MODELOPT, f"{name}: compressed-tensors has no 3-D weights"
        return TensorNames(name, f"{name}_weight_scale", f"{name}_weight_scale_2", f"{name}_input_scale")
    base = name.removesuffix(".weight")
    if dialect is Dialect.MODELOPT:
        return TensorNames(name, f"{base}.weight_scale", f"{base}.weight_scale_2", f"{base}.input_scale")
    return TensorNames(
        f"{base}.weight_packed", f"{base}.weight_scale", f"{base}.weight_global_scale", f"{base}.input_global_scale"
    )


def carries(dialect: Dialect, recipe: Recipe) -> bool:
    """Whether what the recipe makes can be written in the dialect."""
    return recipe in _EXPORTABLE[dialect]


def check_recipe(recipe: Recipe, dialect: Dialect) -> None:
    """Refuse a recipe whose scale does not survive the dialect's form of it (1/(1/x) != x for 17 % of fp32)."""
    if not carries(dialect, recipe):
        options = ", ".join(f"'{r}'" for r in _EXPORTABLE[dialect])
        others = "".join(
            f", or the dialect {other} (dialect=, --dialect)" for other in Dialect if carries(other, recipe)
        )
        raise ValueError(
            f"recipe '{recipe}' cannot be written in the {dialect} dialect without changing bits; use {options}{others}"
        )


def stored(p: Tensor, own_form: Tensor, recipe: Recipe, dialect: Dialect) -> Tensor:
    """Per-tensor scales in the dialect's direction, float32 of any shape."""
    if dialect is Dialect.MODELOPT:
        return p
    return own_form if recipe is Recipe.LLM_COMPRESSOR else p.reciprocal()


def write(name: str, q: NVFP4Tensor, dialect: Dialect, *, transposed: bool = False) -> dict[str, Tensor]:
    """The tensors of one quantized weight: fresh, contiguous. ``transposed``: codes and scales go out as [.., K, N]."""
    names = tensor_names(name, dialect)
    qdata, block_scale = q.qdata, q.block_scale.view(torch.uint8)
    if transposed:
        qdata, block_scale = qdata.mT, block_scale.mT
    scale = stored(q.per_tensor_scale, q.stored_scale, q.recipe, dialect)
    return {
        names.qdata: qdata.clone(memory_format=torch.contiguous_format),
        names.block_scale: block_scale.clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn),
        names.scale: scale.reshape(scale_shape(dialect)).clone(),
    }


def layouts(
    name: str, shape: Sequence[int], dialect: Dialect, *, transposed: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """(dtype, shape) of what :func:`write` gives for a weight [.., N, K].

    >>> layouts("x.weight", (4, 32), Dialect.MODELOPT)["x.weight_scale"]
    (torch.float8_e4m3fn, (4, 2))
    """
    names, (*lead, n, k) = tensor_names(name, dialect), shape
    codes, scales = ((*lead, k // per, n) if transposed else (*lead, n, k // per) for per in (2, BLOCK_SIZE))
    return {
        names.qdata: (torch.uint8, codes),
        names.block_scale: (torch.float8_e4m3fn, scales),
        names.scale: (torch.float32, scale_shape(dialect)),
    }


def scale_shape(dialect: Dialect) -> tuple[int, ...]:
    """Of a per-tensor scale and of an activation scale."""
    return () if dialect is Dialect.MODELOPT else (1,)


def one_number(name: str, stored: Tensor) -> Tensor:
    """A scale as it is stored, [] float32.

    Raises:
        ValueError: several numbers or none, a dtype that is no float of at most 32 bits, NaN, inf, zero or negative.
    """
    scale = _number(name, stored)
    if not bool(torch.isfinite(scale) & (scale > 0)):
        raise ValueError(f"{name} must be one finite number > 0, got [{scale.item()}]")
    return scale


def _number(name: str, stored: Tensor) -> Tensor:
    if stored.numel() != 1 or stored.dtype not in FLOATS:
        raise ValueError(f"{name} must be one float32 number, got {stored.dtype} {list(stored.shape)}")
    return stored.float().reshape(())


def amax_of_input_scale(name: str, stored: Tensor, dialect: Dialect) -> Tensor:
    """The amax that a stored activation scale stands for, [] float32.

    Raises:
        ValueError: it is no scale, or one that no activation can need.
    """
    scale = one_number(name, stored)
    amax = (scale if dialect is Dialect.MODELOPT else scale.reciprocal()) * SCALE_RANGE
    if not bool(torch.isfinite(amax)):
        raise ValueError(f"{name} is {scale.item()}: no activation can need such a scale")
    return amax


class UnseenScales:
    """Scales that were read without a look at their values: a look waits for the device, so one is taken for many."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._items: list[tuple[TensorNames, Tensor, Tensor]] = []

    def add(self, names: TensorNames, scale: Tensor, block_scale: Tensor) -> None:
        """The scales of one weight: [] float32 as it is stored, and those of its blocks."""
        self._items.append((names, scale, block_scale.view(torch.uint8).amax()))

    def require_sound(self) -> None:
        """Look at all that were added since the last look.

        Raises:
            ValueError: a scale that is NaN, infinite, zero or negative, or that its dialect stores as the reciprocal
                of such a number: the first, by name.
        """
        items, self._items = self._items, []
        if not items:
            return
        scales, largest = torch.stack([item[1] for item in items]), torch.stack([item[2] for item in items])
        p = scales if self.dialect is Dialect.MODELOPT else scales.reciprocal()
        given, decoded = (torch.isfinite(x) & (x > 0) for x in (scales, p))
        sound = given & decoded & (largest <= 0x7E)
        if bool(sound.all()):
            return
        i = sound.tolist().index(False)
        names = items[i][0]
        if not given[i]:
            raise ValueError(f"{names.scale} must be one finite number > 0, got [{scales[i].item()}]")
        if largest[i] > 0x7E:
            raise ValueError(
                f"{names.block_scale} holds NaN or negative scales; the checkpoint is damaged or was made from "
                "non-finite weights"
            )
        raise ValueError(f"{names.scale} is {scales[i].item()}, whose reciprocal is no finite number > 0")


def read(
    name: str,
    tensors: dict[str, Tensor],
    dialect: Dialect,
    recipe: Recipe,
    *,
    transposed: bool,
    unseen: UnseenScales | None = None,
) -> NVFP4Tensor:
    """Undo :func:`write`; blocks end up along the last dim. ``unseen`` takes the scales to look at them later.

    Raises:
        ValueError: a scale that is missing, NaN, zero or negative, or tensors of a wrong dtype or shape.
    """
    names = tensor_names(name, dialect)
    for needed in names.weight:
        if needed not in tensors:
            raise ValueError(f"{needed} is missing; {name} cannot be decoded without it")
    qdata, block_scale, scale = (tensors[n] for n in names.weight)
    if qdata.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{names.qdata} must be uint8 and {names.block_scale} float8_e4m3fn, got {qdata.dtype} and "
            f"{block_scale.dtype}"
        )
    scale = _number(names.scale, scale)
    looked_at = UnseenScales(dialect) if unseen is None else unseen
    looked_at.add(names, scale, block_scale)
    if unseen is None:
        looked_at.require_sound()
    if transposed:
        qdata, block_scale = (
            qdata.mT.contiguous(),
            block_scale.view(torch.uint8).mT.contiguous().view(block_scale.dtype),
        )
    p = scale if dialect is Dialect.MODELOPT else scale.reciprocal()
    try:
        return NVFP4Tensor(qdata, block_scale, p, recipe, scale if recipe is Recipe.LLM_COMPRESSOR else p)
    except ValueError as error:
        raise ValueError(f"{names.qdata} and {names.block_scale} do not go together: {error}") from None


# ----------------------------------------------------------------------------------------------------------------- JSON


def quantization_config(dialect: Dialect, ignore: list[str], *, weights_only: bool) -> dict[str, Any]:
    """The ``quantization_config`` entry of config.json."""
    if dialect is Dialect.MODELOPT:
        four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group: dict[str, Any] = {} if weights_only else {"input_activations": dict(four_bits)}
        group |= {"weights": dict(four_bits), "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "quant_algo": _algorithm(weights_only),
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": "modelopt",
        }
    common = {
        "group_size": 16,
        "num_bits": 4,
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    activations = None if weights_only else {"dynamic": "local", "observer": "static_minmax", **common}
    return {
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": activations,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {"dynamic": False, "observer": "memoryless_minmax", **common},
            }
        },
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "moe_sparsity_config": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }


def hf_quant_config(ignore: list[str], *, weights_only: bool) -> dict[str, Any]:
    """ModelOpt's hf_quant_config.json, which TensorRT-LLM takes as authoritative."""
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": _algorithm(weights_only),
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ignore,
        },
    }


def _algorithm(weights_only: bool) -> str:
    return "W4A16_NVFP4" if weights_only else "NVFP4"


_OTHERS = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "mxfp4": "MXFP4",
    "bitsandbytes": "bitsandbytes",
    "auto-round": "AutoRound",
    "nvfp4": "transformers' own NVFP4, which is made while a model is loaded and is not kept in files",
}
"""What other quantization methods are called, by their ``quant_method``."""


def parse_config(config: dict[str, Any], where: str) -> tuple[Dialect, bool]:
    """``(dialect, weights_only)`` of a config.json.

    Raises:
        ValueError: no NVFP4 checkpoint of either dialect (names the method that made it), or an entry of no sense.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        raise ValueError(
            f"{where}: config.json has no quantization_config; this is no NVFP4 checkpoint (quantize_checkpoint, or "
            "`quads-qat quantize`, makes one)"
        )
    where = f"{where}: config.json: quantization_config"
    method = str(_object(quantization, where).get("quant_method", ""))
    ignore = quantization.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ValueError(f"{where}.ignore must be a list of names, got {ignore!r}")
    if method.startswith("modelopt"):
        return Dialect.MODELOPT, _modelopt_weights_only(quantization, where)
    if method == "compressed-tensors":
        return Dialect.COMPRESSED_TENSORS, _compressed_weights_only(quantization, where)
    made_by = f" ({_OTHERS[method]})" if method in _OTHERS else ""
    raise ValueError(
        f"{where}: quant_method is {method!r}{made_by}; only modelopt and compressed-tensors can be read. Load it with "
        "transformers, or start from the original that it was made from"
    )


def _modelopt_weights_only(quantization: dict[str, Any], where: str) -> bool:
    nested = _object(quantization.get("quantization") or {}, f"{where}.quantization")
    algorithm = str(quantization.get("quant_algo") or nested.get("quant_algo") or "").upper()
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(f"{where}: quant_algo is {algorithm!r}; only NVFP4 and W4A16_NVFP4 can be read")
    for group in _groups(quantization, where):
        _require_nvfp4(group, where)
    size = nested.get("group_size", quantization.get("group_size"))
    if size not in (None, BLOCK_SIZE):
        raise ValueError(f"{where}: group_size is {size!r}, but NVFP4 has blocks of {BLOCK_SIZE}")
    return algorithm == "W4A16_NVFP4"


def _compressed_weights_only(quantization: dict[str, Any], where: str) -> bool:
    groups = _groups(quantization, where)
    formats = [quantization.get("format"), *(group.get("format") for group in groups)]
    if "nvfp4-pack-quantized" not in formats:
        raise ValueError(f"{where}: format is {quantization.get('format')!r}; only nvfp4-pack-quantized can be read")
    for group in groups:
        if group.get("format") not in (None, "nvfp4-pack-quantized"):
            raise ValueError(
                f"{where}: a group has format {group['format']!r}; only nvfp4-pack-quantized can be read, not mixtures"
            )
        _require_nvfp4(group, where)
    return all(group.get("input_activations") is None for group in groups)


def _groups(quantization: dict[str, Any], where: str) -> list[dict[str, Any]]:
    groups = _object(quantization.get("config_groups") or {}, f"{where}.config_groups")
    return [_object(group, f"{where}.config_groups.{name}") for name, group in groups.items()]


def _require_nvfp4(group: dict[str, Any], where: str) -> None:
    """What a group says of its weights must be NVFP4, where it says something."""
    weights = _object(group.get("weights") or {}, f"{where}: weights")
    for key, needed in (("num_bits", 4), ("type", "float"), ("group_size", BLOCK_SIZE), ("strategy", "tensor_group")):
        if weights.get(key, needed) != needed:
            raise ValueError(f"{where}: {key} of the weights is {weights[key]!r}, but of NVFP4 it is {needed!r}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {value!r}")
    return value
