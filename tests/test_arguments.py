"""Contract under test: an argument of another kind is refused at the call, by its name and with the way out."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_modules import TINYMOE, fill, linears
from torch import nn

import quads_qat as qq
from quads_qat import ops
from quads_qat.output_shards import pack


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


INTEGERS: dict[str, tuple[int, Callable[[Any], object]]] = {
    "Schedule: start_step": (0, lambda n: qq.Schedule(start_step=n)),
    "ResidualConfig: granularity": (1, lambda n: qq.ResidualConfig(granularity=n)),
    "bucketed: bucket_bytes": (1, lambda n: list(qq.bucketed([("w", X)], n))),
    "export_checkpoint: shard_bytes": (
        1,
        lambda n: qq.export_checkpoint(trainer(), "never", dialect="modelopt", shard_bytes=n),
    ),
    "quantize: shard_bytes": (1, lambda n: qq.quantize_checkpoint("never", "out", shard_bytes=n)),
    "quantize: workers": (1, lambda n: qq.quantize_checkpoint("never", "out", workers=n)),
    "a checkpoint: shard_bytes": (1, lambda n: pack([], n)),
    "GapLogger: every": (1, lambda n: qq.GapLogger(SimpleNamespace(add_scalar=print), every=n)),
}


@pytest.mark.parametrize("what", INTEGERS)
@pytest.mark.parametrize("given", [1.5, 16.0, True, "16", None, -1])
def test_what_must_be_an_integer(what: str, given: object):
    if given is None and what.endswith("workers"):
        return  # as many as there are cores
    least, call = INTEGERS[what]
    rule = f">= {least}, got -1" if given == -1 else f"got {given!r}"
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{what} must be an integer") + f".*{re.escape(rule)}"):
        call(given)


def test_an_integer_of_numpy_is_one():
    assert qq.ResidualConfig(granularity=np.int64(16)).granularity == 16


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.5]), torch.tensor([0.0, torch.nan])])
def test_a_mask_is_no_weight(mask: torch.Tensor):
    with pytest.raises(ValueError, match=r"gap_stats: a mask says which tokens count, 0 or 1, got (0\.5|nan)"):
        qq.gap_stats(torch.zeros(2), torch.ones(2), mask)
    assert qq.gap_stats(torch.zeros(2), torch.ones(2), torch.tensor([1.0, 0.0])).tokens == 1
    assert qq.gap_stats(torch.zeros(2), torch.ones(2), torch.tensor([7, 0])).tokens == 1


@pytest.mark.parametrize("tensor", [torch.arange(10.0)[::2], torch.randn(5, 7).t(), torch.ones(1, 4).expand(3, 4)])
def test_tensors_of_any_strides_are_bucketed(tensor: torch.Tensor):
    ((_, found),) = qq.unbucketed(qq.bucketed([("w", tensor)], 1024))
    assert torch.equal(found, tensor)
