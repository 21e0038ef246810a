"""What other packages offer for the work of our element-wise kernels, with the per-tensor amax given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from quads_qat import reference
from quads_qat.config import Recipe

#: decoded values, or codes and block scales
Result = Tensor | tuple[Tensor, Tensor]
#: x [rows, K] and its amax [] -> a call without arguments
Prepare = Callable[[Tensor, Tensor], Callable[[], Result]]


@dataclass(frozen=True)
class Peer:
    """A function of another package.

    Attributes:
        kernel: our kernel that does the same work.
        load: import it; ImportError where it is missing.
        note: what a reader must know to compare.
    """

    kernel: str
    load: Callable[[], Prepare]
    note: str = ""


def modelopt_fake_quantize() -> Prepare:
    """Triton kernel that Model-Optimizer's dynamic NVFP4 quantizers launch."""
    import_module("modelopt.torch.quantization")  # first: the kernel's package and this one import each other
    kernel = import_module("modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper").fp4_fake_quant_block
    return lambda x, amax: partial(kernel, x, amax)


def modelopt_quantize() -> Prepare:
    """``NVFP4QTensor.quantize``, what its export calls."""
    qtensor = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def prepare(x: Tensor, amax: Tensor) -> Callable[[], Result]:
        scale = amax.float() / 2688.0

        def call() -> Result:
            packed, block_scale, _ = qtensor.quantize(x, 16, weights_scaling_factor_2=scale)
            return packed._quantized_data, block_scale

        return call

    return prepare


def modelopt_dequantize() -> Prepare:
    """``NVFP4QTensor.dequantize`` in torch; its Triton kernel (``fast=True``) needs sm_100."""
    qtensor = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def prepare(x: Tensor, amax: Tensor) -> Callable[[], Result]:
        scale = amax.float() / 2688.0
        packed, block_scale, _ = qtensor.quantize(x, 16, weights_scaling_factor_2=scale)
        scales = {"scale": block_scale, "double_scale": scale, "block_sizes": {-1: 16}}
        return partial(packed.dequantize, x.dtype, **scales)

    return prepare


def torchao_quantize() -> Prepare:
    """``nvfp4_quantize`` of torchao's prototype, compiled."""
    module = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    compiled = torch.compile(module.nvfp4_quantize, dynamic=False)

    def prepare(x: Tensor, amax: Tensor) -> Callable[[], Result]:
        scale = module.per_tensor_amax_to_scale(amax)

        def call() -> Result:
            block_scale, codes = compiled(x, 16, scale)
            return codes, block_scale

        return call

    return prepare


def compressed_tensors_fake_quantize(scales_given: bool) -> Prepare:
    """``fake_quantize``, with or without the block scales that llm-compressor's min-max observers compute for it."""
    fake_quantize = import_module("compressed_tensors.quantization.lifecycle.forward").fake_quantize
    scheme = import_module("compressed_tensors.quantization").preset_name_to_scheme("NVFP4A16", ["Linear"])
    utils = import_module("compressed_tensors.quantization.utils")

    def prepare(x: Tensor, amax: Tensor) -> Callable[[], Result]:
        global_scale = utils.generate_gparam(-amax, amax)

        def block_scales() -> Tensor:
            low, high = x.unflatten(-1, (-1, 16)).aminmax(dim=-1)
            return utils.calculate_qparams(low, high, scheme.weights, global_scale=global_scale)[0]

        if scales_given:
            return partial(fake_quantize, x, block_scales(), None, scheme.weights, global_scale)
        return lambda: fake_quantize(x, block_scales(), None, scheme.weights, global_scale)

    return prepare


FAKE_QUANTIZE = "fake_quantize, amax given"
QUANTIZE = "quantize, amax given"
DEQUANTIZE = "dequantize"
PACKAGES = ("nvidia-modelopt", "torchao", "compressed-tensors")
PEERS: dict[str, Peer] = {
    "nvidia-modelopt fp4_fake_quant_block": Peer(FAKE_QUANTIZE, modelopt_fake_quantize),
    "compressed-tensors fake_quantize": Peer(FAKE_QUANTIZE, partial(compressed_tensors_fake_quantize, False)),
    "compressed-tensors fake_quantize alone": Peer(
        FAKE_QUANTIZE, partial(compressed_tensors_fake_quantize, True), "block scales given: less work"
    ),
    "nvidia-modelopt NVFP4QTensor.quantize": Peer(QUANTIZE, modelopt_quantize),
    "torchao nvfp4_quantize, compiled": Peer(QUANTIZE, torchao_quantize),
    "nvidia-modelopt NVFP4QTensor.dequantize": Peer(DEQUANTIZE, modelopt_dequantize),
}


def bits_of(result: Result, x: Tensor, amax: Tensor) -> str:
    """The recipes that give ``x`` the bits of ``result``; where none does, the nearest and what differs."""
    differing = {recipe: _differing(result, x, amax, recipe) for recipe in Recipe}
    if equal := [recipe.value for recipe, shares in differing.items() if not any(shares.values())]:
        return f"bits of {', '.join(equal)}"
    nearest = min(differing, key=lambda recipe: sum(differing[recipe].values()))
    shares = ", ".join(f"{share:.2g} of the {what}" for what, share in differing[nearest].items())
    return f"bits of no recipe: {shares} differ from {nearest}"


def _differing(result: Result, x: Tensor, amax: Tensor, recipe: Recipe) -> dict[str, float]:
    """What of ``result`` -> which share of it differs from ``recipe``'s."""
    if isinstance(result, Tensor):
        expected = reference.fake_quantize(x, tensor_amax=amax, recipe=recipe)
        return {"values": _share(result.view(torch.int16), expected.view(torch.int16))}
    codes, block_scale = result
    q = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    return {
        "code bytes": _share(codes, q.qdata),
        "scale bytes": _share(block_scale.view(torch.uint8), q.block_scale.view(torch.uint8)),
    }


def _share(a: Tensor, b: Tensor) -> float:
    return (a.reshape(-1) != b.reshape(-1)).sum().item() / a.numel()
