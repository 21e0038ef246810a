"""``update_weights``: new weights for a rollout model, in place, layer by layer, from any stream of named tensors.

Between processes, flat buckets carry the stream. Over ``torch.distributed`` (gloo takes no float8, hence bytes)::

    for entries, bucket in qq.bucketed(qq.export_weights(trainer, "modelopt"), 1 << 28):  # trainer, rank 0
        dist.broadcast_object_list([(entries, bucket.numel())], src=0)
        dist.broadcast(bucket, src=0)
    dist.broadcast_object_list([None], src=0)

    def received():  # rollout
        while True:
            header = [None]
            dist.broadcast_object_list(header, src=0)
            if header[0] is None:
                return
            entries, size = header[0]
            bucket = torch.empty(size, dtype=torch.uint8, device="cuda")  # over gloo: "cpu"
            dist.broadcast(bucket, src=0)
            yield entries, bucket

    qq.update_weights(rollout, qq.unbucketed(received()))

All ranks of a sharded trainer must go through ``export_weights``; with ``ranks=0`` rank 0 alone gets tensors. The
contract goes ahead once: ``qq.contract_of(trainer).to_json()`` there, ``contract=qq.Contract.from_json(entry)`` here.

Between processes of one GPU, CUDA IPC saves the copy: send ``(entries, torch.multiprocessing.reductions.reduce_tensor(
bucket))`` through a queue, and rebuild with ``function, arguments = handle; bucket = function(*arguments)``. Keep the
sender's bucket alive until the receiver says that it is done with it: ``update_weights`` has copied or consumed a
tensor when it asks for the next one.

CUDA graphs that were captured with a rollout compute with the new weights after an update, since no buffer moves; run
the update on the stream that replays, or synchronize in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.config import Mode
from quads_qat.contract import Contract, given_contract
from quads_qat.conversion import conversion_of, require_unwrapped
from quads_qat.sync_layers import Sync, SyncReport
from quads_qat.sync_ledger import Ledger
from quads_qat.sync_plan import Layout, sync_plan
from quads_qat.sync_told import cast_as_told, changed, listed_by, not_compared, notes_of, objections

_STREAMS = "pass quads_qat.export_weights(trainer, 'modelopt') or trainer.state_dict()"

Metadata = Iterable[tuple[str, torch.dtype, tuple[int, ...]]]


def update_weights(
    rollout: nn.Module,
    named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    *,
    metadata: Metadata | None = None,
    strict: bool = True,
    contract: Contract | str | Path | None = None,
) -> SyncReport:
    """Give a rollout model new weights, in place: every parameter and buffer keeps its address. Any number of times.

    A layer is changed when all of its tensors have come and were found right (dtype, shape, finite), so a layer never
    mixes old and new weights. A sync that fails leaves some layers new and others old, and its error says which; the
    rollout then refuses to run, and to give a state_dict, until a complete sync, whatever its layers are: also if all
    are new and a name came too many. Tensors may come in any order, and are copied or consumed before the next is asked
    for, so their memory may be reused; order them by layers (as ``export_weights`` does) to need one layer of extra
    memory.

    Args:
        rollout: converted to ``w4a4_residual``, or from ``load_rollout``.
        named_tensors: (name, tensor) pairs or a dict, on any device. Packed tensors of one dialect in checkpoint names
            (``export_weights``), or tensors in high precision, in checkpoint names or the model's own
            (``trainer.state_dict()``). The latter are quantized on arrival with the rollout's recipe and scale
            groups, whose members wait for each other: the bits are those that ``export_weights`` gives, unless the
            trainer holds its scales (``Schedule``: frozen, ema), which masters do not tell. What fp32 masters are cast
            to first is told by a contract or by a ``state_dict()`` itself, and remembered; until it is told, it is what
            the rollout was made from. Sharded ones (DTensor) are gathered. Of a dict, a list or the like all names,
            dtypes and shapes are checked before any byte changes; of an iterator as they come, unless its metadata are
            given.
        metadata: (name, dtype, shape) of what an iterator will bring (``export_metadata``). All of it is checked before
            any byte changes: a refusal leaves the rollout as it was.
        strict: False takes what comes: incomplete layers keep their old weights, unknown names are ignored.
        contract: what the weights were made under (``contract_of(trainer)``; its ``to_json`` goes through any message).
            Tensors do not say; another recipe, other scale groups and other quantized modules than the rollout's are
            refused before any byte changes; so are weights in high precision of a trainer that holds its scales (of an
            iterator without metadata: when the first comes). Such weights are cast to the contract's export dtype.

    Returns:
        What was done.

    Raises:
        ValueError: not a rollout; a tensor of a wrong dtype, shape or value (NaN, inf, a scale that is no scale); a
            name that comes twice; packed tensors of two dialects, or of one that the rollout's recipe does not go with;
            a scale group of which only a part is packed, or with several scales; among packed tensors, one in high
            precision for a weight that the rollout quantizes; fp32 masters of a trainer whose export dtypes differ,
            if only its contract tells that; at the end, missing or unexpected names (``strict``);
            another ``contract``.
        TypeError: no model, or no stream; what comes is no pair of a name and a tensor. If it is the first that comes,
            the rollout is as it was.

    Warns:
        UserWarning: the ``state_dict()`` of a trainer that holds its scales, quantizes other modules than the rollout,
            or does not quantize yet (``Schedule.start_step``), as far as it came as it was made. A ``contract`` of a
            trainer that does not quantize yet. Weights in high precision under a ``contract`` that has none of the
            rollout's names, so that nothing was compared. Decoded weights (``export_weights(trainer, "dequantized")``)
            that have other values once they are quantized again: such a stream does not tell which scales its trainer
            holds.

    Activation scales that come along replace the static ones; a scale of a rollout that uses none is ignored, and so
    are scales of KV caches. Static residual masks stay as they are: they depend on activations, not on weights. They
    age as the model learns; ``calibrate`` again, or send a state of ``quant_state_dict``.

    >>> trainer, rollout = (nn.Sequential(nn.Linear(32, 8)) for _ in range(2))
    >>> trainer, rollout = qq.convert(trainer, "w4a16"), qq.convert(rollout, "w4a4_residual")  # doctest: +SKIP
    >>> qq.update_weights(rollout, qq.export_weights(trainer, "modelopt")).layers  # doctest: +SKIP
    1
    """
    if isinstance(named_tensors, nn.Module) and not isinstance(rollout, nn.Module):
        raise TypeError(
            f"update_weights: rollout must be a torch.nn.Module, got {type(rollout).__name__}; the order is "
            "update_weights(rollout, named_tensors)"
        )
    root, conversion = conversion_of(rollout, "update_weights", Mode.W4A4_RESIDUAL)
    if conversion.mode is not Mode.W4A4_RESIDUAL:
        raise ValueError(
            f"update_weights: this model is a trainer (mode '{conversion.mode}'), whose weights load_state_dict "
            "changes; pass a rollout model (mode 'w4a4_residual')"
        )
    require_unwrapped(root, "update_weights")
    made_under = None if contract is None else given_contract(contract, "update_weights")
    notes, unheard = notes_of(named_tensors), ""
    if made_under is not None:
        made_under = listed_by(made_under, named_tensors, notes)
        mine = Contract.of_conversion(conversion)
        mine.require_same(made_under, "update_weights", ("the rollout's", "that of contract="), export_dtype=False)
        unheard = not_compared(mine, made_under)
    if conversion.sync.running:
        raise RuntimeError(
            "update_weights: another sync of this rollout is under way (in a thread, or in the generator that this one "
            "reads); let it finish first"
        )
    stream, plan = _stream_of(named_tensors), sync_plan(root, conversion)
    told = cast_as_told(conversion, made_under, notes)
    announced = _check_ahead(lambda: Ledger(root, told, plan, made_under), named_tensors, metadata, strict=strict)
    for objection in objections(named_tensors, notes, conversion, made_under):
        warnings.warn(objection, stacklevel=2)
    state, before, begun = conversion.sync, conversion.sync.broken, False
    state.running = True
    try:
        sync = Sync(root, told, plan, made_under)
        sync.looks = not notes  # a state_dict holds masters, which their trainer quantizes likewise
        for item in stream:
            name, tensor = _checked_item(item)
            if not begun:  # what is no stream at all breaks nothing
                begun, state.broken = True, "the weights of this rollout are being synced; wait for update_weights"
                conversion.weights, conversion.untold = told.weights, told.untold  # the next may be told nothing
            if announced is not None:
                _require_announced(name, (tensor.dtype, tuple(tensor.shape)), announced.pop(name, None))
            sync.take(name, tensor)
        begun = True
        report = sync.finish(strict)
    except BaseException as error:
        state.broken = before
        if begun:
            ages = sync.ages()
            state.broken = (
                f"the last weight sync of this rollout failed ({type(error).__name__}: {error}): {ages}; send all "
                "weights again with quads_qat.update_weights"
            )
            _say_also(error, f"{ages}; the rollout refuses to run until a complete sync")
        raise
    finally:
        state.running = False
    state.broken = before if report.missing else ""
    if unheard and not notes and sync.ledger.took_masters():  # packed tensors and metadata tell it themselves
        warnings.warn(unheard, stacklevel=2)
    if sync.requantized:
        warnings.warn(changed(sync.requantized), stacklevel=2)
    return report


def _stream_of(named_tensors: Any) -> Iterator[Any]:
    if isinstance(named_tensors, (nn.Module, Tensor, str, bytes)) or not isinstance(named_tensors, Iterable):
        raise TypeError(
            f"update_weights: named_tensors must be (name, tensor) pairs or a dict, got "
            f"{type(named_tensors).__name__}; {_STREAMS}"
        )
    return iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)


def _checked_item(item: Any) -> tuple[str, Tensor]:
    name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(
            f"update_weights: named_tensors must yield (name, tensor) pairs, got {type(name).__name__} and "
            f"{type(tensor).__name__}; {_STREAMS}"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"update_weights: {name} is of the layout {tensor.layout}; send it dense: tensor.to_dense()")
    if tensor.is_meta:
        raise ValueError(f"update_weights: {name} is on the meta device and has no values; load the weights first")
    return name, tensor


def _check_ahead(
    new_ledger: Callable[[], Ledger], named_tensors: Any, metadata: Metadata | None, *, strict: bool
) -> dict[str, Layout] | None:
    """Rehearse the sync with all that is known of it; what the metadata announces, if there is any.

    Of an iterator nothing is known; of a dict, a list and the like all but the values.
    """
    try:
        announced = None if metadata is None else _rehearse(new_ledger(), metadata, "metadata", strict=strict)
        if isinstance(named_tensors, Collection):
            items = map(_checked_item, _stream_of(named_tensors))
            layouts = ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items)
            for name, layout in _rehearse(new_ledger(), layouts, "named_tensors", strict=strict).items():
                if announced is not None:
                    _require_announced(name, layout, announced.get(name))
        return announced
    except (TypeError, ValueError) as error:
        _say_also(error, "nothing was changed")
        raise


def _rehearse(ledger: Ledger, layouts: Metadata, what: str, *, strict: bool) -> dict[str, Layout]:
    """Name -> (dtype, shape)."""
    announced = {}
    for name, dtype, shape in layouts:
        ledger.enter(name, dtype, tuple(shape))
        announced[name] = dtype, tuple(shape)
    ledger.require_whole(what, strict=strict)
    return announced


def _require_announced(name: str, came: Layout, announced: Layout | None) -> None:
    if came != announced:
        raise ValueError(f"update_weights: {name} is not what the metadata announced, once for each name")


def _say_also(error: BaseException, what: str) -> None:
    """Add to the message of an error; one of another type than ours is the sender's own, and stays as it is."""
    if type(error) in (TypeError, ValueError) and len(error.args) == 1:
        error.args = (f"{error}; {what}",)
