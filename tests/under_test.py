"""What the property suites call ``reference``: itself or, with QUADS_QAT_UNDER_TEST=kernels, its Triton twin.

The twin runs on a GPU where there is one, else in Triton's interpreter; results come back to the CPU.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quads_qat import library, ops, reference
from quads_qat.qtensor import NVFP4Tensor

KERNELS = os.environ.get("QUADS_QAT_UNDER_TEST") == "kernels"
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _there(value: Any) -> Any:
    return value.to(_DEVICE) if isinstance(value, Tensor | NVFP4Tensor) else value


def _kernel(name: str) -> Any:
    extra = {} if name == "dequantize" else {"check_finite": False}

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: _there(value) for key, value in kwargs.items()}
        return getattr(ops, name)(*map(_there, args), **kwargs, **extra, backend="triton").to("cpu")

    return call


def _amax(*tensors: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return library.amax([_there(x) for x in tensors], dims, "triton").cpu()


def implementation() -> Any:
    """The functions of ``reference``, those that have a kernel replaced."""
    if not KERNELS:
        return reference
    kernels = {name: _kernel(name) for name in ("quantize", "dequantize", "fake_quantize")}
    return SimpleNamespace(**{**vars(reference), **kernels, "amax": _amax})
