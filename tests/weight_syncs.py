"""What the tests of ``update_weights`` share: trainers, rollouts, streams of weights, and when two states are equal."""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import ListModel, fill
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat import names
from quads_qat.conversion import conversion_of
from quads_qat.packed_module import PackedModule

Stream = list[tuple[str, Tensor]]


@cache
def _trainer(arch: str, seed: int, recipe: str) -> nn.Module:
    model = fill(ListModel(), seed).bfloat16() if arch == "list" else tiny_model(arch, seed=seed)
    return qq.convert(model, "w4a16", recipe=recipe)


@cache
def _rollout(arch: str, seed: int, recipe: str) -> nn.Module:
    return qq.convert(trainer(arch, seed, recipe), "w4a4_residual")


def trainer(arch: str = "qwen3_moe", seed: int = 1, recipe: str = "aligned") -> nn.Module:
    return copy.deepcopy(_trainer(arch, seed, recipe))


def rollout(arch: str = "qwen3_moe", seed: int = 0, recipe: str = "aligned") -> Any:
    return copy.deepcopy(_rollout(arch, seed, recipe))


def fresh(arch: str = "qwen3_moe", seed: int = 1, recipe: str = "aligned") -> dict[str, Tensor]:
    """The state of a rollout that was never synced. Read only."""
    return _rollout(arch, seed, recipe).state_dict()


@cache
def fresh_logits(arch: str = "qwen3_moe", seed: int = 1) -> Tensor:
    return logits(_rollout(arch, seed, "aligned"))


def on_disk(model: nn.Module) -> dict[str, Tensor]:
    """The master weights in the names of a BF16 checkpoint."""
    return names.disk_state(model, {n: t for n, t in model.state_dict().items() if n in names.state_dict_names(model)})


FORMS: dict[str, Callable[[nn.Module], Iterable[tuple[str, Tensor]]]] = {
    "modelopt": lambda model: qq.export_weights(model, "modelopt"),
    "compressed-tensors": lambda model: qq.export_weights(model, "compressed-tensors"),
    "the model's names": lambda model: model.state_dict().items(),
    "checkpoint names": lambda model: on_disk(model).items(),
}
forms = pytest.mark.parametrize("form", FORMS)


def packed(model: nn.Module | None = None, dialect: str = "modelopt") -> Stream:
    return _packed(dialect) if model is None else list(qq.export_weights(model, dialect))


@cache
def _packed(dialect: str) -> Stream:
    return list(qq.export_weights(trainer(), dialect))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Also of a rollout whose sync failed, which gives none to users."""
    with conversion_of(model, "")[1].sync.readable():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], only: str = "") -> None:
    __tracebackhide__ = True
    assert actual.keys() == expected.keys()
    assert any(only in name for name in expected)
    for name, tensor in expected.items():
        if only in name:
            assert_same_bits(actual[name], tensor, name)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return (
            model(torch.ones(2, 3, 32).bfloat16())
            if isinstance(model, ListModel)
            else model(**tiny_inputs(model)).logits
        )


def refused(model: Any, stream: Any, message: str, **options: Any) -> None:
    """A sync from an iterator fails with ``message``, the rollout refuses to run, a complete sync repairs it."""
    __tracebackhide__ = True
    with pytest.raises((ValueError, TypeError), match=message):
        qq.update_weights(model, iter(stream), **options)
    with pytest.raises(RuntimeError, match=r"the last weight sync of this rollout failed .*; send all weights again"):
        logits(model)
    for part in (model, next(m for m in model.modules() if isinstance(m, PackedModule))):
        with pytest.raises(RuntimeError, match="the last weight sync of this rollout failed"):
            part.state_dict()  # which a whole rollout would load without a word
    failed = state(model)
    qq.update_weights(model, trainer(seed=2).state_dict())
    assert_same_state(state(model), fresh(seed=2))
    assert_same_bits(logits(model), fresh_logits(seed=2))
    model.load_state_dict(failed)


Q = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.2"


def change(stream: Iterable[tuple[str, Tensor]], name: str, by: Callable[[Tensor], Tensor]) -> Stream:
    stream = list(stream)
    assert name in dict(stream)
    return [(n, by(t.clone()) if n == name else t) for n, t in stream]


def poke(value: float) -> Callable[[Tensor], Tensor]:
    def poked(t: Tensor) -> Tensor:
        t = t.detach()
        t.view(-1)[-1] = value
        return t

    return poked


def byte(value: int) -> Callable[[Tensor], Tensor]:
    def poked(t: Tensor) -> Tensor:
        t.view(torch.uint8).view(-1)[-1] = value
        return t

    return poked


def shapes(stream: Iterable[tuple[str, Tensor]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]
