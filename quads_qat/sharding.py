"""Weights that are sharded over ranks (DTensor): shard by shard, with the amax of the whole.

Quantization needs the whole weight for one number only, the amax that its per-tensor scale is made from. Blocks run
along K, so a shard is quantized where it lies, as long as no cut falls inside a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.formats import BLOCK_SIZE


def is_sharded(weight: Tensor) -> bool:
    """Whether ``weight`` is a DTensor."""
    return hasattr(weight, "placements")


def local(weight: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return weight.to_local() if is_sharded(weight) else weight  # pyright: ignore[reportAttributeAccessIssue]


def computed_in(root: nn.Module) -> dict[str, torch.dtype]:
    """Name of a parameter -> the dtype to which FSDP2 casts it for a forward (``MixedPrecisionPolicy``), where it does.

    A parameter belongs to the innermost unit around it.
    """
    found: dict[str, torch.dtype] = {}
    for prefix, module in root.named_modules():  # units come before those inside them
        state = getattr(module, "_get_fsdp_state", None)
        policy = getattr(state(), "_mp_policy", None) if state is not None else None
        if policy is not None:
            for name, parameter in module.named_parameters(prefix):
                found[name] = policy.param_dtype or parameter.dtype
    return found


def cuts(placement: Any, dim: int | None = None) -> bool:
    """Whether a placement of a DTensor's shards its ``dim`` (None: any dim).

    A dim that two mesh dims cut (FSDP2 over tensor parallelism) has a strided shard, which newer versions of torch do
    not call a shard.
    """
    sharded = placement.is_shard() or hasattr(placement, "split_factor")
    return sharded and (dim is None or placement.dim == dim)


def max_over_shards(amax: Tensor, weights: Sequence[Tensor], *, keep_first_dim: bool) -> Tensor:
    """``amax`` of this rank's shards of ``weights`` -> that of all shards, on all ranks of their mesh.

    Args:
        amax: [] or, with ``keep_first_dim``, [E].
        weights: the DTensors that it was taken from, each cut in its own way; anything else changes nothing.
        keep_first_dim: shards along dim 0 are other experts, with amaxes of their own.
    """
    meshes = {}  # one reduction for each mesh dim, in the same order on all ranks
    for weight in filter(is_sharded, weights):
        for i, placement in enumerate(weight.placements):  # pyright: ignore[reportAttributeAccessIssue]
            if cuts(placement) and not (keep_first_dim and cuts(placement, 0)):
                meshes[weight.device_mesh, i] = None  # pyright: ignore[reportAttributeAccessIssue]
    for mesh, i in meshes:
        amax = amax.float()  # gloo does not reduce every 16-bit type; the maximum is the same
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=mesh.get_group(i))
    return amax


def require_same_experts(weights: Sequence[Tensor]) -> None:
    """Stacks [E, ...] that share scales are cut along E alike: else amaxes of different experts would be compared.

    Raises:
        ValueError: they are not.
    """
    along = {tuple(i for i, p in enumerate(getattr(w, "placements", ())) if cuts(p, 0)) for w in weights}
    if len(along) > 1:
        how = " and ".join(f"{tuple(w.shape)} {getattr(w, 'placements', 'whole')}" for w in weights)
        raise ValueError(
            f"expert stacks that share per-tensor scales are cut over ranks in different ways: {how}; shard them along "
            "E over the same mesh dim"
        )


def gather_first_dim(amax: Tensor, weight: Tensor) -> Tensor:
    """[E of this rank's shard of ``weight``] -> [E], on all ranks of its mesh; of a weight that is whole, as it is."""
    if not is_sharded(weight) or amax.ndim == 0:
        return amax
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore[reportAttributeAccessIssue]
    along = [placement if cuts(placement, 0) else Replicate() for placement in placements]
    return DTensor.from_local(amax, mesh, along, run_check=False, shape=weight.shape[:1], stride=(1,)).full_tensor()


def part_of_first_dim(amax: Tensor, weight: Tensor) -> Tensor:
    """[E] -> [E of this rank's shard of ``weight``]; [] as it is."""
    if not is_sharded(weight) or amax.ndim == 0:
        return amax
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore[reportAttributeAccessIssue]
    along = [placement if cuts(placement, 0) else Replicate() for placement in placements]
    return distribute_tensor(amax, mesh, along, src_data_rank=None).to_local()


@contextmanager
def together(who: str, model: nn.Module, consequence: str) -> Iterator[None]:
    """The ranks that share the weights of ``model`` leave the block together, all with an error if one of them has one.

    For what a rank may refuse alone, of its disk or files, beside gathers that the others would wait in: inside the
    block it takes part in all of them, also where it fails. Where nothing is sharded, ranks do not communicate.

    Raises:
        RuntimeError: another rank failed; says which, why, and the ``consequence``.
    """
    raised = None
    try:
        yield
    except Exception as error:  # one that ends the process (Ctrl-C) ends the others' waiting too
        raised = error
    raise_together(who, model, raised, consequence)


def raise_together(who: str, model: nn.Module, raised: Exception | None, consequence: str) -> None:
    """The end of :func:`together`: raise what this rank has ``raised``, or that another one did."""
    said = raised and f"rank {rank()} failed ({type(raised).__name__}: {raised})"
    for mesh, i in {(p.device_mesh, i): None for p in _sharded(model) for i in range(p.device_mesh.ndim)}:
        every = [said] * mesh.size(i)
        torch.distributed.all_gather_object(every, said, group=mesh.get_group(i))
        said = next(filter(None, every), None)
    if raised is not None:
        raise raised
    if said is not None:
        raise RuntimeError(f"{who}: {said}; {consequence}")


def shards(model: object) -> bool:
    """Whether parameters of the model are sharded, so that its ranks depend on each other."""
    return bool(_sharded(model))


def _sharded(model: Any) -> list[Any]:
    return [p for p in model.parameters() if is_sharded(p)] if isinstance(model, nn.Module) else []


def rank() -> int:
    """Of this process; 0 without ``torch.distributed``."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0


def on_shards(weight: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function(weight)``; of a DTensor, ``function`` of each shard, sharded alike. No gradient passes."""
    if not is_sharded(weight):
        return function(weight)
    from torch.distributed.tensor import DTensor

    out = function(local(weight))
    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def cut_block(weight: Tensor, dim: int) -> str | None:
    """How the shards of ``weight`` cut blocks of 16 along ``dim``; None if they do not.

    >>> cut_block(torch.zeros(8, 40), 1)
    """
    if not is_sharded(weight):
        return None
    size, dim = weight.shape[dim], dim % weight.ndim
    for i, placement in enumerate(weight.placements):  # pyright: ignore[reportAttributeAccessIssue]
        if cuts(placement, dim):
            ranks = weight.device_mesh.size(i)  # pyright: ignore[reportAttributeAccessIssue]
            if problem := cut_by(size, ranks):
                return problem
            size = -(-size // ranks)
    return None


def cut_by(size: int, ranks: int) -> str | None:
    """How ``ranks`` shards of a dim of ``size`` cut blocks of 16; None if they do not.

    >>> cut_by(1856, 8)
    'K = 1856 over 8 ranks is 232 a rank, not a multiple of 16'
    >>> cut_by(2048, 8)
    """
    share = -(-size // ranks)
    if ranks == 1 or share % BLOCK_SIZE == 0:
        return None
    return f"K = {size} over {ranks} ranks is {share} a rank, not a multiple of 16"
