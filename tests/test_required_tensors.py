"""Contract under test: a checkpoint that lacks a tensor of its architecture, or has it in another shape, is refused."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, rewritten, tensors
from tiny_models import ARCHITECTURES, tiny_model

import quads_qat as qq
from quads_qat import names
from quads_qat.checkpoint_io import Reader
from quads_qat.compare import inspect_checkpoint
from quads_qat.required_tensors import require_tensors
from quads_qat.safetensors_file import Entry
from quads_qat.skeleton import skeleton

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"


class Headers(Reader):
    """A checkpoint of which only the headers are there, to be changed."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.path, self._file_of, self._entries = Path("here"), dict.fromkeys(entries, "x"), entries


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_of_every_architecture(arch: str, tmp_path: Path) -> None:
    """What transformers saves is complete; without any one of its tensors it is not, nor with one of another shape."""
    tiny_model(arch).save_pretrained(tmp_path)
    stored = Reader(tmp_path)
    model = skeleton(stored)
    entries = {name: stored.entry(name) for name in stored.names()}
    assert names.disk_layouts(model).keys() == entries.keys()
    require_tensors(stored, model)
    kinds = {re.sub(r"\d+", "#", name): name for name in entries}
    assert len(kinds) > 7
    for name in list(kinds.values())[:: max(1, len(kinds) // 4)]:
        rest = {other: entry for other, entry in entries.items() if other != name}
        said = f"{name} missing"
        if any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ()):  # pyright: ignore
            require_tensors(Headers(rest), model)
        else:
            with pytest.raises(ValueError, match=re.escape(said)):
                require_tensors(Headers(rest), model)
        entry = entries[name]
        wrong = rest | {name: Entry(entry.dtype, (*entry.shape, 2), 0)}
        with pytest.raises(ValueError, match=rf"{re.escape(name)} has shape .*, but by config.json it must have"):
            require_tensors(Headers(wrong), model)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "norm": ({"model.norm.weight": None}, r"model\.norm\.weight missing, which Qwen3MoeForCausalLM needs"),
    "router": ({"model.layers.1.mlp.gate.weight": None}, r"layers\.1\.mlp\.gate\.weight missing"),
    "two": (dict.fromkeys(("model.norm.weight", "lm_head.weight")), "and 1 more tensors missing"),
    "shape": (
        {"model.layers.0.input_layernorm.weight": torch.ones(127, dtype=torch.bfloat16)},
        r"input_layernorm\.weight has shape \[127\], but by config.json it must have \[128\]",
    ),
    "codes": (
        {"model.norm.weight": torch.ones(128, dtype=torch.int64)},
        r"model\.norm\.weight must be torch\.bfloat16 or another float",
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_quantize_and_verify_refuse_an_incomplete_source(how: str, tmp_path: Path) -> None:
    change, match = CHANGES[how]
    source = rewritten(SOURCE, tmp_path / "source", change)
    with pytest.raises(ValueError, match=match):
        qq.quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    qq.quantize_checkpoint(SOURCE, tmp_path / "out")
    with pytest.raises(ValueError, match=match):
        qq.verify_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "shape"])
def test_inspect_sees_an_incomplete_checkpoint(how: str, tmp_path: Path) -> None:
    change, match = CHANGES[how]
    path = CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4"
    assert inspect_checkpoint(path)["problems"] == []
    (problem,) = inspect_checkpoint(rewritten(path, tmp_path / "out", change))["problems"]
    assert re.search(match, problem)


@pytest.mark.parametrize("what", ["attention", "an expert"])
def test_what_is_excluded_must_be_there_too(what: str, tmp_path: Path) -> None:
    name, options = {
        "attention": ("model.layers.0.self_attn.k_proj.weight", {"scope": "experts"}),
        "an expert": ("model.layers.0.mlp.experts.2.down_proj.weight", {"exclude": ["model.layers.0.mlp.experts"]}),
    }[what]
    source = rewritten(SOURCE, tmp_path / "source", {name: None})
    with pytest.raises(ValueError, match=f"{name} missing"):
        qq.quantize_checkpoint(source, tmp_path / "out", **options)  # pyright: ignore[reportArgumentType]


def test_other_names_that_transformers_finds(tmp_path: Path) -> None:
    """Experts in a stack, though they stay as they are; the other name of a tied weight; tensors without a prefix."""
    stored = tensors(SOURCE)
    experts = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(4)]
    stack = {"model.layers.0.mlp.experts.down_proj": torch.stack([stored[name] for name in experts])}
    gate_up = [
        torch.cat([stored[f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(4)
    ]
    stack["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    gone = dict.fromkeys(name for name in stored if ".layers.0.mlp.experts." in name)
    source = rewritten(SOURCE, tmp_path / "stacked", gone | stack)
    qq.quantize_checkpoint(source, tmp_path / "a", exclude=["model.layers.0.mlp.experts"])
    assert torch.equal(tensors(tmp_path / "a")[next(iter(stack))], next(iter(stack.values())))

    tiny_model("ernie4_5_moe").save_pretrained(tmp_path / "tied")
    kept = tensors(tmp_path / "tied")
    change = {"model.embed_tokens.weight": None, "lm_head.weight": kept["model.embed_tokens.weight"]}
    reader = Reader(rewritten(tmp_path / "tied", tmp_path / "head", change))
    require_tensors(reader, skeleton(reader))

    entries = {name.removeprefix("model."): entry for name, entry in Reader(SOURCE)._entries.items()}
    require_tensors(Headers(entries), skeleton(Reader(SOURCE)))


def test_buffers_of_own_code_may_be_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = shutil.copytree(SOURCE, tmp_path / "source")
    (source / "modeling_own.py").write_text(
        "import torch\nfrom transformers import Qwen3MoeForCausalLM\n"
        "class OwnForCausalLM(Qwen3MoeForCausalLM):\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.register_buffer('table', torch.ones(3))\n",
        "utf-8",
    )
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (source / "config.json").write_text(json.dumps(config(SOURCE) | own), "utf-8")
    with pytest.warns(UserWarning, match="the buffer table of OwnForCausalLM is missing"):
        qq.quantize_checkpoint(source, tmp_path / "out", trust_remote_code=True)
    shutil.rmtree(tmp_path / "out")
    gone = rewritten(source, tmp_path / "gone", {"model.norm.weight": None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"model\.norm\.weight missing, which OwnForCausalLM needs"):
            qq.quantize_checkpoint(gone, tmp_path / "out", trust_remote_code=True)
