"""Modules that hold packed NVFP4 weights: codes and scales alone, 0.5625 bytes a weight, which no dtype move touches.

How they are replaced, moved, pickled, saved and loaded; what they compute is in ``residual``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, ResidualScope
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import is_hooked

_FIELDS = ("qdata", "block_scale", "per_tensor_scale", "stored_scale")
_OPTIONAL = ("input_amax", "residual_mask")
_DTYPES = {
    **{"qdata": torch.uint8, "block_scale": torch.float8_e4m3fn, "per_tensor_scale": torch.float32},
    **{"stored_scale": torch.float32, "input_amax": torch.float32, "residual_mask": torch.bool},
}


@dataclass(eq=False)
class SyncState:
    """Whether the weights of a rollout belong together; one object for all of its packed modules.

    Attributes:
        broken: why they do not (a weight sync that failed half-way); "" while they do.
        running: whether a sync is under way.
    """

    broken: str = ""
    running: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"running": False}  # nobody syncs a copy

    def require_whole(self) -> None:
        """Raise RuntimeError in a rollout that mixes old and new weights."""
        if self.broken:
            raise RuntimeError(self.broken)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the state of the rollout can be read all the same, by the sync that makes it whole."""
        broken, self.broken = self.broken, ""
        try:
            yield
        finally:
            self.broken = broken


Record = Callable[[nn.Module, str, "int | None", Tensor], None]
"""Sees (module, parameter, expert, input rows) of every GEMM; expert -1: hidden states before they are dispatched."""


class PackedModule(nn.Module):
    """Holds :class:`NVFP4Tensor` objects as buffers that ``.to(dtype)``, ``.half()`` and friends leave alone."""

    recipes: dict[str, Recipe]
    activation: ActivationFormat | None
    residual: ResidualConfig | None
    sync: SyncState
    record: Record | None = None
    full_name: str = ""  #: in its model, for errors

    def set_packed(self, name: str, q: NVFP4Tensor) -> None:
        """Register the fields of ``q`` as buffers ``<name>_qdata``, ``<name>_block_scale``, ..."""
        self.recipes[name] = q.recipe
        q = replace(q, stored_scale=q.stored_scale.clone())  # often the same tensor: files want one place for each
        for part in _FIELDS:
            self.register_buffer(f"{name}_{part}", getattr(q, part))

    def require_usable(self) -> None:
        """Raise RuntimeError if the weights do not belong together, or transformers' hooks cut inputs and outputs."""
        self.sync.require_whole()
        if is_hooked(self):
            raise RuntimeError(
                f"a {type(self).__name__} was parallelized by transformers (tp_plan, DistributedConfig), which cannot "
                "shard packed weights; give every rank a whole rollout"
            )

    def load_packed(self, name: str, q: NVFP4Tensor) -> None:
        """Replace the codes and scales of weight ``name`` in place: every buffer keeps its address.

        The only way for new weights into a module that runs: what is derived from them is refreshed here.

        Raises:
            ValueError: as :meth:`fit_packed`. Nothing is changed then.
        """
        fitted = self.fit_packed(name, q)
        for part in _FIELDS:
            self._buffers[f"{name}_{part}"].copy_(getattr(fitted, part))  # pyright: ignore[reportOptionalMemberAccess]
        self.refresh(name)

    def fit_packed(self, name: str, q: NVFP4Tensor) -> NVFP4Tensor:
        """``q`` with its per-tensor scale in the shape of the module's: [], [E] or one per row.

        Raises:
            ValueError: another shape or recipe than the module's, or parts with different scales where the module has
                one scale for them.
        """
        here = self.packed(name)
        if q.shape != here.shape or q.recipe is not here.recipe:
            raise ValueError(
                f"load_packed: {name} must be {tuple(here.shape)} of recipe '{here.recipe}', got {tuple(q.shape)} of "
                f"'{q.recipe}'"
            )
        shape, lead = here.per_tensor_scale.shape, q.qdata.ndim - 2
        scales = {part: _in_shape(getattr(q, part), shape, lead) for part in ("per_tensor_scale", "stored_scale")}
        if any(scale is None for scale in scales.values()):
            raise ValueError(
                f"load_packed: {name} has one per-tensor scale {list(shape)} for parts that came with different ones; "
                "send weights whose scale groups (gate/up, all experts of a stack) share their scale"
            )
        return replace(q, **scales)  # pyright: ignore[reportArgumentType]

    def refresh(self, name: str) -> None:
        """Recompute, in place, what is derived from the codes and scales of ``name``. Nothing is, so far."""

    def calibrated(self, name: str, what: str) -> Tensor | None:
        """``input_amax`` or ``residual_mask`` of the input of weight ``name``; None before a calibration."""
        return self._buffers[what if name == "weight" else f"{name}_{what}"]

    def set_calibrated(self, name: str, what: str, value: Tensor | None) -> None:
        """Set :meth:`calibrated`; in place where the shape allows it."""
        buffer = what if name == "weight" else f"{name}_{what}"
        old = self._buffers[buffer]
        with torch.inference_mode(False):  # a tensor made in it could never be changed outside of it
            value = None if value is None else value.detach().clone()
        if old is not None and value is not None and old.shape == value.shape and not old.is_inference():
            old.copy_(value)
        else:
            self._buffers[buffer] = None if value is None else value.to(self.packed(name).device)

    def uses_input_amax(self, name: str) -> bool:
        """Whether the input of weight ``name`` has a static scale, in use or kept from a checkpoint."""
        static = self.activation is not None and self.activation.scale is ActivationScale.STATIC
        return static or self.calibrated(name, "input_amax") is not None

    def packed(self, name: str = "weight") -> NVFP4Tensor:
        """The codes and scales of a weight, as they are now (no copy)."""
        parts = {part: getattr(self, f"{name}_{part}") for part in _FIELDS}
        return NVFP4Tensor(recipe=self.recipes[name], **parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        kept = {f"{name}_{part}": self._buffers[f"{name}_{part}"] for name in self.recipes for part in _FIELDS}
        kept |= {name: b for name, b in self._buffers.items() if name.endswith(_OPTIONAL)}
        moved = {name: None if buffer is None else _moved(buffer, fn) for name, buffer in kept.items()}
        self._buffers.update(dict.fromkeys(kept))
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers.update(kept)  # a failed move (out of memory, say) loses nothing
            raise
        self._buffers.update(moved)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Block scales as bytes: plain pickle cannot load a float8 tensor."""
        return {**self.__dict__, "_buffers": self._viewed_scales(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers = self._viewed_scales(torch.float8_e4m3fn)

    def _viewed_scales(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        scales = {f"{name}_block_scale" for name in self.recipes}
        return {
            name: buffer.view(dtype) if name in scales and buffer is not None else buffer
            for name, buffer in self._buffers.items()
        }

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.sync.require_whole()  # whoever loads it could not tell
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if problems := [*self.problems_of(state_dict, prefix)]:
            args[-1].extend(problems)  # error_msgs: load_state_dict raises them together
            return
        for name, buffer in self._buffers.items():
            if buffer is None and name.endswith(_OPTIONAL) and prefix + name in state_dict:
                device = next(b.device for b in self._buffers.values() if b is not None)
                self._buffers[name] = torch.empty_like(state_dict[prefix + name], device=device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name in self.recipes:
            self.refresh(name)

    def problems_of(self, state_dict: dict[str, Any], prefix: str) -> Iterator[str]:
        """What shows that a state is not one of this rollout: a torn weight, another recipe, another mask."""
        for name, recipe in self.recipes.items():
            yield from self._other_dtypes(name, state_dict, prefix)
            there = [f"{prefix}{name}_{part}" in state_dict for part in _FIELDS]
            if any(there) and not all(there):
                yield f"{prefix}{name}_{_FIELDS[there.index(False)]} is missing beside the rest of its weight"
            key = "residual_mask" if name == "weight" else f"{name}_residual_mask"
            mask = state_dict.get(prefix + key)
            if mask is not None and (problem := self.mask_problem(mask)):
                yield f"{prefix}{key}: {problem}"
            scale = state_dict.get(f"{prefix}{name}_per_tensor_scale")
            if recipe is not Recipe.ALIGNED or scale is None or scale.is_meta:
                continue
            if bool((torch.frexp(scale.float())[0] != 0.5).any()):
                yield (
                    f"{prefix}{name}: its per-tensor scale is no power of two, so the state is of another recipe than "
                    "this rollout's 'aligned'; load it into a rollout of the checkpoint that it belongs to"
                )

    def _other_dtypes(self, name: str, state_dict: dict[str, Any], prefix: str) -> Iterator[str]:
        """Codes and scales that were cast: they would be converted back as numbers, rounded or as other bits."""
        for part, dtype in _DTYPES.items():
            key = prefix + (part if name == "weight" and part in _OPTIONAL else f"{name}_{part}")
            found = state_dict.get(key)
            if isinstance(found, Tensor) and found.dtype != dtype:
                yield f"{key} must be {dtype}, got {found.dtype}; load the state in the dtypes in which it was saved"

    def mask_problem(self, mask: Tensor) -> str | None:
        """Why a static mask [K] or [E, K] does not belong to this rollout's ``ResidualConfig``."""
        residual: ResidualConfig | None = getattr(self, "residual", None)
        if residual is None or residual.scope is not ResidualScope.STATIC or mask.is_meta:
            return None
        wanted = residual.selected(mask.shape[-1] // residual.granularity) * residual.granularity
        if bool((mask.sum(-1) == wanted).all()):
            return None
        return (
            f"the mask selects {int(mask.sum(-1).max())} of {mask.shape[-1]} channels, fraction={residual.fraction} is "
            f"{wanted}; calibrate the rollout, or load it with the fraction that the mask was made for"
        )


def _in_shape(scale: Tensor, shape: torch.Size, lead: int) -> Tensor | None:
    """A scale [], [E] or [(E,) N, 1] in another of these shapes; None if values would be lost. ``lead``: 1 for [E]."""
    if scale.shape == shape:
        return scale  # a comparison would make the host wait, once for each weight of a sync
    rows = scale.view(*scale.shape, 1, 1) if scale.ndim == lead == 1 else scale
    if len(shape) == lead == 1:
        wanted = rows.expand(*shape, *rows.shape[1:]) if rows.ndim == 3 else rows.expand(*shape, 1, 1)
        wanted = wanted.flatten(1)
        return wanted[:, 0] if bool((wanted == wanted[:, :1]).all()) else None
    if len(shape) == 0:
        wanted = scale.flatten()
        return wanted[0] if bool((wanted == wanted[0]).all()) else None
    return rows.expand(shape)


def _moved(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn(buffer)`` without its dtype: of what a module's methods do, the device, sharing and emptiness are kept."""
    if buffer.dtype == torch.float8_e4m3fn:
        return _moved(buffer.view(torch.uint8), fn).view(buffer.dtype)  # as bytes: a float would be converted
    moved = fn(buffer)
    return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
