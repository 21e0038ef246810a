"""A checkpoint's model without its weights: the architecture of config.json with all parameters on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads_qat.checkpoint_io import Reader


def skeleton(
    reader: Reader,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The transformers model of a checkpoint directory: parameters on meta, buffers real, no weights read.

    Args:
        reader: of the directory. Its names decide about a prefix that the architecture may have on disk.
        dtype: of the parameters; None: the config's, or where it has none the files'.
        trust_remote_code: run the model code that the directory brings, where transformers has none.

    Raises:
        ValueError: an architecture that the installed transformers does not have.
    """
    path = reader.path
    architecture, listed = architecture_of(path, reader.config, trust_remote_code=trust_remote_code)
    import transformers

    try:
        config = architecture.config_class.from_pretrained(str(path))
        for entry in ("quantization_config", "quads_qat"):  # of the checkpoint, not of the model
            if hasattr(config, entry):
                delattr(config, entry)
        with torch.device("cpu"), _parameters_on_meta():
            model = architecture._from_config(config, dtype=dtype or config.dtype or reader.dtype())
    except Exception as error:  # whatever one of transformers' configs or models raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{path}: transformers {transformers.__version__} cannot build {listed[0]} from config.json ({why})"
        ) from error
    adopt_prefix(model, reader.names())
    return model.eval()


def architecture_of(path: str | Path, config: dict[str, Any], *, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """(model class, what config.json lists): of transformers, or from the directory's own code if that is trusted."""
    import transformers

    listed = config.get("architectures") or []
    name = listed[0] if isinstance(listed, list) and listed else None
    architecture: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if architecture is not None:
        return architecture, listed
    own = config.get("auto_map") if isinstance(config.get("auto_map"), dict) else {}
    code = own.get("AutoModelForCausalLM") or own.get("AutoModel")  # pyright: ignore[reportOptionalMemberAccess]
    if code is None:
        raise ValueError(
            f"{path}: config.json must name an architecture of transformers {transformers.__version__}, got "
            f"architectures={listed}; install a release that has it, or correct the entry"
        )
    if not trust_remote_code:
        raise ValueError(
            f"{path}: {name} is not in transformers {transformers.__version__}; its code is in the directory ({code}). "
            "Read it, then pass trust_remote_code=True (--trust-remote-code) to run it"
        )
    return _own_class(path, code), listed


def _own_class(path: str | Path, code: Any) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if not isinstance(code, str):
        raise ValueError(f"{path}: config.json must name its model code as file.Class, got {code!r}")
    if "--" in code:
        raise ValueError(f"{path}: config.json takes its model code from another repository ({code}); copy it here")
    try:
        return get_class_from_dynamic_module(code, str(path), local_files_only=True)
    except Exception as error:  # whatever the code raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: its model code {code} cannot be loaded ({why})") from error


def adopt_prefix(model: nn.Module, disk_names: Collection[str]) -> None:
    """Record a prefix of names on disk (text models cut out of multimodal ones), as ``from_pretrained`` does."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)  # pyright: ignore[reportArgumentType]
    kept, adopted = [], False
    for conversion in conversions:
        if isinstance(conversion, PrefixChange):
            inside = f"{conversion.model_prefix}." if conversion.model_prefix else ""
            prefix = f"{inside}{conversion.prefix_to_remove}."
            of_whole_model = conversion.prefix_to_remove is not None and conversion.scope_prefix is None
            if not of_whole_model or not any(name.startswith(prefix) for name in disk_names):
                continue
            adopted = True
        kept.append(conversion)
    if adopted:
        model.__dict__["_weight_conversions"] = kept


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters take no memory; buffers (rotary tables) are computed as ever."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: Any) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:  # one that is there already may be tied: it must stay the same
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = original
