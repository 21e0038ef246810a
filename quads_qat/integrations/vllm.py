"""vLLM: a plugin that runs rollouts of NVFP4 checkpoints, residual included, inside the engine.

vLLM finds it through the entry point ``vllm.general_plugins`` and calls :func:`register` in each of its processes.
Without ``QUADS_QAT_VLLM`` in the environment that does nothing. With ``QUADS_QAT_VLLM=1``, linears and experts of NVFP4
checkpoints (ModelOpt or compressed-tensors, W4A4 or W4A16, anyone's) multiply what ``load_rollout`` multiplies: the
packed weights as vLLM has loaded them, and activations that are quantized by ``quads_qat.ops``.

What is done with activations stands in the ``quads_qat`` entry of config.json (``export_checkpoint(residual=...)``).
These variables override it:

===============================  ====================================================================================
``QUADS_QAT_RESIDUAL``           a JSON object of ``ResidualConfig``, e.g. ``{"fraction": 0.5, "scope": "token"}``
``QUADS_QAT_ACTIVATION_SCALE``   ``per_token`` or ``static``, the input scales of the checkpoint
``QUADS_QAT_ACTIVATION_RECIPE``  the arithmetic of activations: ``aligned``, ``transformer-engine``, ...
===============================  ====================================================================================

Where nothing is said, a W4A4 checkpoint gets the defaults of ``load_rollout``, and a W4A16 one stays with vLLM's own
kernels, as it stays weight-only there.

How it gets in: ``register_linear_kernel`` is vLLM's public hook. It puts a kernel behind all others, and vLLM does not
look there for W4A16, under ``--linear-backend`` or with VLLM_BATCH_INVARIANT; for experts there is no such hook. So the
functions that choose kernels are replaced, in the modules that import them (:data:`PATCHES`), by ones that ask
:func:`~quads_qat.integrations.vllm_policy.serving` first. So is the one that latent attention (MLA) gets the weights of
``kv_b_proj`` from: it multiplies them by an identity matrix, which is no longer one when activations are quantized.
:func:`unregister` undoes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from quads_qat.config import Dialect
from quads_qat.integrations.vllm_policy import overrides

TESTED = ("0.33",)
"""Releases of vLLM whose code was run with this plugin: ``make test-engines``."""

SWITCH = "QUADS_QAT_VLLM"

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors"
LINEARS, EXPERTS = "init_nvfp4_linear_kernel", "select_nvfp4_moe_backend"
DECODE = "get_and_maybe_dequant_weights"
PATCHES: tuple[tuple[str, str, Dialect | None], ...] = (
    (f"{_QUANTIZATION}.modelopt", LINEARS, Dialect.MODELOPT),
    (f"{_QUANTIZATION}.modelopt", EXPERTS, Dialect.MODELOPT),
    (f"{_COMPRESSED}.schemes.compressed_tensors_w4a4_nvfp4", LINEARS, Dialect.COMPRESSED_TENSORS),
    (
        f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
        EXPERTS,
        Dialect.COMPRESSED_TENSORS,
    ),
    ("vllm.model_executor.layers.attention.mla_attention", DECODE, None),
)
"""(module of vLLM, function that it imported by name, dialect of the layers that it serves)."""

_replaced: dict[tuple[str, str], Any] = {}


def register() -> None:
    """The entry point: with ``QUADS_QAT_VLLM`` set, put the plugin in. Any number of times; else vLLM is left alone.

    Raises:
        RuntimeError: a release of vLLM that was not tested (``QUADS_QAT_VLLM=force`` tries it), or one without the
            functions that are replaced.
        ValueError: a variable that means nothing.
    """
    switch = os.environ.get(SWITCH, "").strip().lower()
    if switch in ("", "0", "false", "off"):
        return
    if switch not in ("1", "true", "on", "force"):
        raise ValueError(f"{SWITCH} must be 1, 0 or force, got {switch!r}")
    overrides()  # a mistake shows when the engine starts, not when it loads a layer
    _require_tested(metadata.version("vllm"), force=switch == "force")
    if _replaced:
        return
    found: dict[tuple[str, str], Any] = {
        (module, name): getattr(import_module(module), name, None) for module, name, _ in PATCHES
    }
    missing = [f"{module}.{name}" for (module, name), function in found.items() if not callable(function)]
    if missing:
        raise RuntimeError(
            f"quads_qat: vLLM {metadata.version('vllm')} has no {missing[0]}, which the plugin replaces; use vLLM "
            f"{TESTED[-1]}, or unset {SWITCH}"
        )
    from quads_qat.integrations import vllm_kernels

    vllm_kernels.register_with_vllm()
    makers: dict[str, Callable[..., Any]] = {
        LINEARS: vllm_kernels.linear_chooser,
        EXPERTS: vllm_kernels.experts_chooser,
        DECODE: vllm_kernels.decoder,
    }
    for module, name, dialect in PATCHES:
        _replaced[module, name] = found[module, name]
        setattr(import_module(module), name, makers[name](found[module, name], dialect))


def unregister() -> None:
    """Take the plugin out: models that are built from now on are vLLM's own."""
    if not _replaced:
        return
    from quads_qat.integrations import vllm_kernels

    for (module, name), function in _replaced.items():
        setattr(import_module(module), name, function)
    _replaced.clear()
    vllm_kernels.unregister_from_vllm()


def _require_tested(version: str, *, force: bool) -> None:
    if not force and ".".join(version.split(".")[:2]) not in TESTED:
        raise RuntimeError(
            f"quads_qat: the vLLM plugin was tested with vLLM {', '.join(TESTED)}, got {version}; install one of them, "
            f"set {SWITCH}=force to try this one, or unset {SWITCH}"
        )
