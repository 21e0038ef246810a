"""Whether a checkpoint has every tensor that its architecture needs, as config.json says: from headers alone.

A norm or a router that is missing is no error anywhere else: files are copied without it, and transformers makes up
random values, with a warning among others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection

from torch import nn

from quads_qat import names
from quads_qat.checkpoint_io import Reader


def require_tensors(reader: Reader, model: nn.Module, checked: Collection[str] = ()) -> None:
    """Compare the tensors of a checkpoint with what ``model`` (on meta will do) writes: names, shapes, kinds of dtype.

    A tensor may come under any name under which transformers finds it, experts may be stacked, one name of a tied
    weight is enough. Tensors that the model does not have are no matter here.

    Args:
        reader: the checkpoint.
        model: of its config.json, see :func:`~quads_qat.skeleton.skeleton`.
        checked: names on disk that the caller compares: weights that are quantized.

    Raises:
        ValueError: names the first tensor that is missing, of another shape, or no float.

    Warns:
        UserWarning: a buffer is missing of a model whose own code may compute it.
    """
    usual = names.disk_layouts(model)
    layouts = {name: t for name, t in usual.items() if name not in checked}
    lacking = [name for name in layouts if name not in reader]
    if lacking:
        lacking = _lacking_under_any_name([n for n in reader.names() if n not in usual], reader, model, lacking)
    if lacking:
        more = f" and {len(lacking) - 1} more tensors" if len(lacking) > 1 else ""
        raise ValueError(
            f"{reader.path}: {lacking[0]}{more} missing, which {type(model).__name__} needs; download or save the "
            "checkpoint again, or correct config.json"
        )
    for name, expected in layouts.items():
        if name not in reader:
            continue
        found = reader.entry(name)
        if found.shape != tuple(expected.shape):
            raise ValueError(
                f"{reader.path}: {name} has shape {list(found.shape)}, but by config.json it must have "
                f"{list(expected.shape)}; one of the two is of another model"
            )
        names.require_float(f"{reader.path}: {name}", found.dtype, expected.dtype)


def _lacking_under_any_name(others: list[str], reader: Reader, model: nn.Module, lacking: list[str]) -> list[str]:
    """Those of ``lacking`` that none of ``others`` provides, and that the model cannot do without."""
    in_memory = names.names_in_memory(model, [*lacking, *others])
    provided = {in_memory[name] for name in others}
    for one, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if provided & {one, other}:
            provided |= {one, other}
    optional = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    found = [
        name
        for name in lacking
        if in_memory[name] not in provided and not any(pattern.search(in_memory[name]) for pattern in optional)
    ]
    if type(model).__module__.startswith("transformers."):
        return found
    buffers = {name for name, _ in model.named_buffers()}  # transformers' models load theirs
    if computed := [name for name in found if in_memory[name] in buffers]:
        warnings.warn(
            f"{reader.path}: the buffer {computed[0]} of {type(model).__name__} is missing ({len(computed)} such); it "
            "keeps the value that the model's code gives it",
            stacklevel=4,
        )
    return [name for name in found if in_memory[name] not in buffers]
