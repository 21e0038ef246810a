"""Contract under test: an argument of another kind is refused at the call, by its name and with the way out."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import TINYMOE, fill, linears
from torch import nn

import quads_qat as qq
from quads_qat import ops


def trainer() -> nn.Module:
    return qq.convert(fill(linears("layers.0.q_proj", "layers.1.q_proj")), "w4a16")


TAKE_A_MODEL: dict[str, Callable[[Any], object]] = {
    "accumulate": lambda model: qq.accumulate(model).__enter__(),
    "calibrate": lambda model: qq.calibrate(model, [torch.zeros(1, 32)]),
    "check_first_step": qq.check_first_step,
    "check_tp": lambda model: qq.check_tp(model, 2),
    "convert": lambda model: qq.convert(model, "w4a16"),
    "coverage": qq.coverage,
    "diagnose": lambda model: qq.diagnose(model, trainer(), torch.zeros(1, 4, dtype=torch.long)),
    "export_checkpoint": lambda model: qq.export_checkpoint(model, "never", dialect="modelopt"),
    "export_metadata": lambda model: qq.export_metadata(model, "modelopt"),
    "export_weights": lambda model: qq.export_weights(model, "modelopt"),
    "full_precision": lambda model: qq.full_precision(model).__enter__(),
    "load_quant_state_dict": lambda model: qq.load_quant_state_dict(model, {}),
    "observe_activations": lambda model: qq.observe_activations(model).__enter__(),
    "quant_state_dict": qq.quant_state_dict,
    "revert": qq.revert,
    "step": qq.step,
    "update_weights": lambda model: qq.update_weights(model, {}),
    "verify": lambda model: qq.verify(model, "never"),
}


@pytest.mark.parametrize("given", [None, "out"])
@pytest.mark.parametrize("who", TAKE_A_MODEL)
def test_no_model(who: str, given: object):
    with pytest.raises(TypeError, match=rf"^{who}: .*must be a torch\.nn\.Module, got {type(given).__name__}"):
        TAKE_A_MODEL[who](given)


def test_a_path_is_to_be_loaded_first():
    with pytest.raises(TypeError, match="load it first"):
        qq.convert(Path("out"), "w4a16")  # pyright: ignore[reportArgumentType, reportCallIssue]


X = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
WEIGHT = ops.quantize(X[:, :32].repeat(8, 1))
RESIDUAL: Any = {"fraction": 0.5}
SCHEDULE: Any = {"start_step": 3}
ACTIVATION: Any = {"scale": "per_token"}
LIMITS: Any = {"mean": 1.0}

DICTS: dict[str, tuple[Callable[[], object], str]] = {
    "load_rollout": (lambda: qq.load_rollout("never", residual=RESIDUAL), "residual"),
    "convert": (lambda: qq.convert(linears("q_proj"), "w4a4_residual", residual=RESIDUAL), "residual"),
    "convert, schedule": (lambda: qq.convert(linears("q_proj"), "w4a16", schedule=SCHEDULE), "schedule"),
    "quantize": (lambda: qq.quantize_checkpoint(TINYMOE, "never", residual=RESIDUAL), "residual"),
    "export_checkpoint": (
        lambda: qq.export_checkpoint(trainer(), "never", dialect="modelopt", residual=RESIDUAL),
        "residual",
    ),
    "check_first_step": (lambda: qq.check_first_step(trainer(), limits=LIMITS), "limits"),
    "quantize_activation": (lambda: ops.quantize_activation(X, residual=RESIDUAL), "residual"),
    "quantize_activation, activation": (lambda: ops.quantize_activation(X, ACTIVATION), "activation"),
    "linear_w4a4": (lambda: ops.linear_w4a4(X, WEIGHT, activation=ACTIVATION), "activation"),
    "residual_linear": (lambda: ops.residual_linear(X, WEIGHT, RESIDUAL), "residual"),
    "residual_linear, activation": (
        lambda: ops.residual_linear(X, WEIGHT, qq.ResidualConfig(), activation=ACTIVATION),
        "activation",
    ),
}
KINDS = {
    "residual": "ResidualConfig(fraction=0.5)",
    "schedule": "Schedule(start_step=3)",
    "activation": "ActivationFormat(scale='per_token')",
    "limits": "GapLimits(mean=1.0)",
}


@pytest.mark.parametrize("case", DICTS)
def test_a_dict_is_no_config(case: str):
    call, argument = DICTS[case]
    who = case.partition(",")[0]
    kind = KINDS[argument].partition("(")[0]
    message = f"{who}: {argument} must be a {kind} or None, got dict; pass {KINDS[argument]}"
    message = message.replace("a Activation", "an Activation")
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()


def test_a_number_is_no_residual():
    number: Any = 0.5
    with pytest.raises(
        TypeError, match=r"residual must be a ResidualConfig or None, got float; pass ResidualConfig\(\.\.\.\)$"
    ):
        qq.load_rollout("never", residual=number)


def test_a_model_opt_config_takes_both():
    from quads_qat.integrations.modelopt import ModelOptConfig

    assert ModelOptConfig(residual=RESIDUAL).residual == qq.ResidualConfig(fraction=0.5)
    number: Any = 0.5
    with pytest.raises(TypeError, match=r"^ModelOptConfig: residual must be a ResidualConfig or None, got float"):
        ModelOptConfig(residual=number)
