"""A ``state_dict`` that does not fit a rollout is refused before any of it is loaded: else old and new weights mix.

What is missing altogether is left to ``strict``, which a hook is not told: a part may be loaded on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from quads_qat.packed_module import PackedModule


def refuse_unfit_states(root: nn.Module) -> None:
    """Make ``root.load_state_dict`` of a rollout raise RuntimeError, unchanged, where it used to load a part."""
    root.register_load_state_dict_pre_hook(_refuse)


def _refuse(root: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    modules = [(f"{name}." if name else "", m) for name, m in root.named_modules(remove_duplicate=False)]
    problems = [problem for name, module in modules for problem in _problems(module, state, prefix + name)]
    if problems:
        more = f", and {len(problems) - 1} more like it" if len(problems) > 1 else ""
        raise RuntimeError(f"load_state_dict: {problems[0]}{more}; nothing was loaded, the rollout is unchanged")


def _problems(module: nn.Module, state: dict[str, Tensor], prefix: str) -> Iterator[str]:
    if isinstance(module, PackedModule):
        yield from module.problems_of(state, prefix)
    elif type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return  # it may know other shapes
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        found = state.get(prefix + name)
        if tensor is None or not isinstance(found, Tensor) or (tensor.ndim == 0 and found.ndim == 1):
            continue
        if found.shape != tensor.shape:
            yield f"{prefix}{name} must have shape {list(tensor.shape)}, got {list(found.shape)}"
