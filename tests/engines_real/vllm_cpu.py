"""vLLM's own model classes and loaders on a CPU: no engine runs, its attention kernels need a GPU.

``conftest.py`` sets the variables that make this possible before anything imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from by_hand import tensors
from torch import Tensor, nn
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
from vllm.model_executor.layers.fused_moe import config as fused_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized_moe
from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import Nvfp4QuantizationEmulationTritonExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import PlatformEnum
from vllm.utils.network_utils import get_open_port

#: Parameters that attention makes for a quantized KV cache; our checkpoints say nothing of one.
KV_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale", "p_scale", "_zero_point")


class _AlsoWithoutGates:
    """vLLM's CPU platform, except that experts without gates are not refused when their layer is made."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)


_kept: list[Any] = []


@cache
def emulate() -> None:
    """vLLM has no NVFP4 kernels for a CPU: choose its emulation, whose layout is the checkpoint's, for W4A16 too."""
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    for module in (modelopt, compressed_tensors_w4a4_nvfp4):
        choose = module.init_nvfp4_linear_kernel
        module.init_nvfp4_linear_kernel = lambda use_a16=False, choose=choose: choose(use_a16=False)
    emulation = NvFp4MoeBackend.EMULATION, Nvfp4QuantizationEmulationTritonExperts
    for module in (modelopt, compressed_moe):
        module.select_nvfp4_moe_backend = lambda config, weight_key, activation_key: emulation
    fused_config.current_platform = _AlsoWithoutGates(fused_config.current_platform)
    unquantized_moe.select_unquantized_moe_backend = lambda *_, **__: (UnquantizedMoeBackend.TRITON, TritonExperts)
    library = torch.library.Library("_C", "FRAGMENT")  # names that constructors look up; nothing calls them
    for name in ("gelu_new", "gelu_fast", "gelu_quick"):
        library.define(f"{name}(Tensor! out, Tensor x) -> ()")
    _kept.append(library)
    # vLLM looks at each model class in a process of its own, which takes ten seconds
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )


def join_group(path: Path) -> None:
    """One process is the whole group; with a model that has experts, so that there is a group of experts."""
    with set_current_vllm_config(config_of(path)):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, backend="gloo")
        initialize_model_parallel(1, 1)


def config_of(path: Path) -> VllmConfig:
    with set_current_vllm_config(VllmConfig()):
        model = ModelConfig(
            model=str(path), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
        )
        return VllmConfig(model_config=model, device_config=DeviceConfig("cpu"), load_config=LoadConfig())


@contextmanager
def bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Served:
    """A model of vLLM, its parameters NaN until :meth:`load`."""

    def __init__(self, path: Path, *, extra: dict[str, Any] | None = None, load_format: str = "auto") -> None:
        if extra:
            written = path / "config.json"
            written.write_text(json.dumps(_merged(json.loads(written.read_text("utf-8")), extra)), encoding="utf-8")
        self.path, self.config = path, config_of(path)
        self.config.load_config.load_format = load_format
        with set_current_vllm_config(self.config), bf16():
            self.model: nn.Module = initialize_model(vllm_config=self.config)
        reload.record_metadata_for_reloading(self.model)
        for name, parameter in self.model.named_parameters():
            if not name.endswith(KV_SCALES):
                _poison(parameter)

    def load(self, stored: Iterable[tuple[str, Tensor]] | None = None) -> Served:
        """The checkpoint's tensors, or others, through the model's own loader."""
        with set_current_vllm_config(self.config):
            self.model.load_weights(iter(tensors(self.path).items() if stored is None else stored))
        return self

    def fill_with_dummies(self) -> Served:
        """What ``--load-format dummy`` does."""
        DummyModelLoader(self.config.load_config).load_weights(self.model, self.config.model_config)
        return self

    def finish(self) -> Served:
        """What vLLM does to packed layers after it has loaded: scales are merged, kernels get their layout.

        Its function for whole models also packs convolutions and attention, for which there are no kernels here.
        """
        with set_current_vllm_config(self.config):
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and any(p.dtype == torch.uint8 for p in module.parameters()):
                    method.process_weights_after_loading(module)
        return self

    def reload(self, stored: Iterable[tuple[str, Tensor]]) -> None:
        """New weights, layer by layer, into the tensors that are there: start, update, finish."""
        with set_current_vllm_config(self.config):
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(stored))
            reload.finalize_layerwise_reload(self.model, self.config.model_config)


def _merged(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _merged(config[k], v) if isinstance(v, dict) and k in config else v for k, v in extra.items()}
    return config | nested


def _poison(parameter: Tensor) -> None:
    if parameter.dtype == torch.float8_e4m3fn:
        parameter.data.view(torch.uint8).fill_(0x7F)
    elif parameter.is_floating_point():
        parameter.data.fill_(torch.nan)
    else:
        parameter.data.fill_(-1 if parameter.dtype.is_signed else 0xFF)


def packed_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Module with codes -> names of its weights: of a linear one, of experts two; after :meth:`Served.finish`."""
    found = {}
    for name, module in model.named_modules():
        weights = [w for w in ("weight", "w13_weight", "w2_weight") if getattr(module, w, None) is not None]
        weights = [w for w in weights if getattr(module, w).dtype == torch.uint8]
        if weights:
            found[name] = tuple(weights)
    return found


def decoded(module: nn.Module, weight: str) -> Tensor:
    """A packed weight as vLLM's own emulation decodes it."""
    scale = getattr(module, "weight_global_scale" if weight == "weight" else f"{weight}_scale_2")
    return dequantize_to_dtype(
        getattr(module, weight).data, getattr(module, f"{weight}_scale").data, scale.data, torch.bfloat16, swizzle=False
    )


def trained(arch: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """``engines.measure.trainer``; vLLM decorates the transformers classes that it runs, which then want its config."""
    from engines.measure import trainer

    if not _small:
        return trainer(arch)
    with set_current_vllm_config(config_of(_small[0])):
        return trainer(arch)


_small: list[Path] = []


def prepare(path: Path) -> None:
    """Everything a test needs, once; ``path`` is a place for a small checkpoint."""
    import quads_qat as qq

    emulate()
    if not _small:
        qq.export_checkpoint(trained("qwen3_moe")[0], path, dialect="modelopt")
        join_group(path)
        _small.append(path)
