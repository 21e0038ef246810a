"""Contract under test: bad input to an export is one line that names it and the way out; nothing half-written stays.

``quantize_checkpoint`` and ``export_checkpoint`` share the writer, so what can go wrong there is tried with either.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, rewritten, tensors
from tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import quads_qat as qq
from quads_qat import Dialect, checkpoint_io, safetensors_file
from quads_qat.names import DiskLayoutError

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"


def dense(**options: Any) -> nn.Module:
    return qq.convert(AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / "qwen3"), "w4a16", **options)


def refused(match: str, call: Callable[[], Any], folder: Path | None = None) -> str:
    """The one-line message; ``folder`` must be as before."""
    before = sorted(folder.rglob("*")) if folder else []
    with pytest.raises(ValueError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*") if folder else []) == before
    return str(error.value)


EXPORTS = {
    "export_weights": lambda model, path: list(qq.export_weights(model, "modelopt")),
    "export_metadata": lambda model, path: qq.export_metadata(model, "modelopt"),
    "export_checkpoint": lambda model, path: qq.export_checkpoint(model, path, dialect="modelopt"),
}
exports = pytest.mark.parametrize("export", EXPORTS)


# The model.


@exports
def test_an_unconverted_model(export: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / "qwen3")
    match = f"{export}: this model has not been converted; call quads_qat.convert"
    refused(match, lambda: EXPORTS[export](model, tmp_path / "out"), tmp_path)


@exports
def test_a_rollout_model(export: str, tmp_path: Path) -> None:
    rollout = qq.convert(dense(), "w4a4_residual")
    match = f"{export}: a rollout model holds packed weights only; export the trainer model"
    refused(match, lambda: EXPORTS[export](rollout, tmp_path / "out"), tmp_path)


@exports
def test_a_meta_model(export: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, hidden_size=32, moe_intermediate_size=32))
    qq.convert(model, "w4a16")
    match = f"{export}: model.embed_tokens.weight is on the meta device and has no values; load"
    refused(match, lambda: EXPORTS[export](model, tmp_path / "out"), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("export", ["export_weights", "export_checkpoint"])
def test_a_weight_that_is_not_finite(export: str, value: float, tmp_path: Path) -> None:
    model, name = dense(), "model.layers.1.self_attn.k_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[2, 3] = value
    refused(f"{name}: the weight holds 1 NaN or inf", lambda: EXPORTS[export](model, tmp_path / "out"), tmp_path)


def test_a_source_weight_that_is_not_finite(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weight = tensors(SOURCE)[name].clone()
    weight[0, 0] = torch.nan
    source = rewritten(SOURCE, tmp_path / "source", {name: weight})
    refused(
        f"{name}: the weight holds 1 NaN or inf", lambda: qq.quantize_checkpoint(source, tmp_path / "out"), tmp_path
    )


def test_dialects_and_recipes(tmp_path: Path) -> None:
    model = dense()
    refused(
        "Dialect: unknown value 'gguf'; choose one of modelopt, compressed-tensors, dequantized$",
        lambda: qq.export_weights(model, "gguf"),
    )
    refused("compressed-tensors, dequantized$", lambda: qq.export_metadata(model, "gguf"))
    refused(  # which writes files that announce a dialect
        "choose one of modelopt, compressed-tensors$",
        lambda: qq.export_checkpoint(model, tmp_path / "out", dialect="dequantized"),
    )
    assert qq.export_metadata(model, "Dequantized") == qq.export_metadata(model, "dequantized")
    refused("group_by must be 'layer', got 'size'", lambda: qq.export_weights(model, "modelopt", group_by="size"))
    carried = {
        "aligned": list(Dialect),
        **{f"modelopt{kind}": [Dialect.MODELOPT] for kind in ("", "-ieee", "-static", "-static-ieee")},
        "llm-compressor": [Dialect.COMPRESSED_TENSORS],
        "transformer-engine": [],
    }
    assert carried.keys() == {recipe.value for recipe in qq.Recipe}
    for recipe, good in carried.items():
        qq.convert(qq.revert(model), "w4a16", recipe=recipe)
        for dialect in Dialect:
            if dialect in good:
                assert qq.export_metadata(model, dialect)
            else:
                match = f"recipe '{recipe}' cannot be written in the {dialect} dialect without changing bits; use 'al"
                refused(match, lambda dialect=dialect: qq.export_weights(model, dialect))


@pytest.mark.parametrize(
    ("arch", "modules"),
    [
        ("inkling2", ["model.layers.*.mlp.experts"]),
        (
            "inkling_vl",
            ["model.language_model.layers.*.mlp.experts", "model.language_model.layers.*.mlp.shared_experts"],
        ),
        ("lara_mini", ["model.layers.*.linear_attn.in_proj_qkv", "model.layers.*.linear_attn.in_proj_z"]),
    ],
)
def test_weights_that_are_merged_or_permuted_on_disk(arch: str, modules: list[str], tmp_path: Path) -> None:
    """Training them works; the message is the ``exclude`` that lets the rest be exported."""
    model = tiny_model(arch)
    qq.convert(model, "w4a16")
    message = refused("no NVFP4 layout covers; convert with exclude", lambda: qq.export_metadata(model, "modelopt"))
    assert message.endswith(f"convert with exclude={modules} (--exclude)")
    model.save_pretrained(tmp_path / "source")
    refused("no NVFP4 layout", lambda: qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out"), tmp_path)
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out", exclude=modules)
    with pytest.raises(ValueError, match="no NVFP4 layout") as error:
        qq.export_weights(model, "compressed-tensors")
    assert isinstance(error.value.__cause__, DiskLayoutError)


# The destination.


def test_the_destination_must_be_new(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data", "utf-8")
    (tmp_path / "file").write_text("data", "utf-8")
    for name in ("out", "file"):
        match = f"{tmp_path / name} exists already; remove it or choose another"
        refused(match, lambda name=name: qq.quantize_checkpoint(SOURCE, tmp_path / name), tmp_path)
        refused(match, lambda name=name: qq.export_checkpoint(dense(), tmp_path / name, dialect="modelopt"), tmp_path)
    same = "source and destination are the same directory; choose another destination"
    refused(same, lambda: qq.quantize_checkpoint(SOURCE, SOURCE), SOURCE)
    refused(same, lambda: qq.export_checkpoint(dense(), SOURCE, dialect="modelopt", source=SOURCE), SOURCE)
    for parent in ("no/such", "file"):
        match = f"{parent}: no such directory; create it first"
        refused(match, lambda parent=parent: qq.quantize_checkpoint(SOURCE, tmp_path / parent / "out"), tmp_path)


def test_a_destination_that_cannot_be_made(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    refused("could not be written .* too long", lambda: qq.quantize_checkpoint(SOURCE, long), tmp_path)
    long = tmp_path / ("x" * 250)  # and the temporary name beside it is too long
    refused(
        "could not be written .* too long", lambda: qq.export_checkpoint(dense(), long, dialect="modelopt"), tmp_path
    )


def test_too_little_space_is_noticed_before_writing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    match = r"out: needs about \d+\.\d kB, 1\.0 kB are free there"
    refused(match, lambda: qq.quantize_checkpoint(SOURCE, tmp_path / "out"), tmp_path)
    refused(match, lambda: qq.export_checkpoint(dense(), tmp_path / "out", dialect="modelopt"), tmp_path)


def test_a_disk_that_fills_up_at_the_third_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written, pwrite = [0], os.pwrite

    def limited(file: int, data: Any, at: int) -> int:
        written[0] += len(data)
        if written[0] > 50_000:
            raise OSError(28, "No space left on device")
        return pwrite(file, data, at)

    monkeypatch.setattr(safetensors_file.os, "pwrite", limited)
    call = lambda: qq.export_checkpoint(dense(), tmp_path / "out", dialect="modelopt", shard_bytes=20_000)  # noqa: E731
    refused("out: could not be written .*No space left on device.*; nothing was left behind", call, tmp_path)


LIMITED = """
import resource, sys
import quads_qat as qq
from transformers import AutoModelForCausalLM
model = qq.convert(AutoModelForCausalLM.from_pretrained(sys.argv[1]), "w4a16")
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    qq.export_checkpoint(model, sys.argv[2], dialect="modelopt", shard_bytes=int(sys.argv[3]))
except ValueError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_file_that_the_system_cuts_off(tmp_path: Path) -> None:
    """The real thing, not a stand-in: writes beyond the limit fail in the middle of a shard."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(SOURCE), str(tmp_path / "out"), "1000000"], capture_output=True, text=True
    )
    assert "refused: " in result.stderr, result.stderr
    assert "could not be written" in result.stderr
    assert list(tmp_path.iterdir()) == []


# The source.


def sharded(target: Path) -> Path:
    """The source in several shards."""
    model = AutoModelForCausalLM.from_pretrained(SOURCE)
    model.save_pretrained(target, max_shard_size="60KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def test_shards_are_read(tmp_path: Path) -> None:
    for source, out in ((SOURCE, "one"), (sharded(tmp_path / "source"), "many")):
        qq.quantize_checkpoint(source, tmp_path / out)
    one, many = (tensors(tmp_path / out) for out in ("one", "many"))
    assert all(torch.equal(one[name].view(-1).view(torch.uint8), many[name].view(-1).view(torch.uint8)) for name in one)
    assert one.keys() == many.keys()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _without_an_entry(source: Path) -> None:
    index = json.loads((source / checkpoint_io.INDEX).read_text("utf-8"))
    index["weight_map"].pop("model.layers.1.mlp.experts.2.up_proj.weight")
    (source / checkpoint_io.INDEX).write_text(json.dumps(index), "utf-8")


def _with_a_wrong_entry(source: Path) -> None:
    _place(source, "model.norm.weight", min(source.glob("*.safetensors")).name)


def _with_a_tensor_twice(source: Path) -> None:
    placed = json.loads((source / checkpoint_io.INDEX).read_text("utf-8"))["weight_map"]
    name, file = next((n, f) for n, f in placed.items() if list(placed.values()).count(f) > 1)
    shutil.copy(source / file, source / "extra.safetensors")
    _place(source, name, "extra.safetensors")


def _place(source: Path, name: str, file: str) -> None:
    index = json.loads((source / checkpoint_io.INDEX).read_text("utf-8"))
    index["weight_map"][name] = file
    (source / checkpoint_io.INDEX).write_text(json.dumps(index), "utf-8")


def _with_header(change: Callable[[str], str]) -> Callable[[Path], None]:
    """The first shard's header changed, its data as before."""

    def damage(source: Path) -> None:
        shard = min(source.glob("*.safetensors"))
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = change(data[8 : 8 + length].decode().rstrip()).encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])

    return damage


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda s: min(s.glob("*.safetensors")).unlink(), "shard model-00001-of-.* is missing; download"),
    "shard truncated": (lambda s: _truncate(min(s.glob("*.safetensors"))), "model-00001-of-.* is damaged .*; download"),
    "shard empty": (lambda s: min(s.glob("*.safetensors")).write_bytes(b""), "model-00001-of-.* is damaged"),
    "index truncated": (lambda s: _truncate(s / checkpoint_io.INDEX), "index.json: cannot be read as JSON"),
    "index empty": (lambda s: (s / checkpoint_io.INDEX).write_text("{}"), "must hold a weight_map"),
    "index is a list": (lambda s: (s / checkpoint_io.INDEX).write_text("[1]"), "must hold a JSON object"),
    "index lacks a weight": (_without_an_entry, r"holds .*experts\.2\.up_proj\.weight, which .* does not list"),
    "index misplaces a weight": (_with_a_wrong_entry, "lacks model.norm.weight, which the index places there"),
    "tensor in two shards": (
        _with_a_tensor_twice,
        r"source: \S+ is in (model-|extra)\S+ and in (model-|extra)\S+; remove",
    ),
    "index leads out": (
        lambda s: _place(s, "model.norm.weight", "../escape.safetensors"),
        r"places model\.norm\.weight in '\.\./escape\.safetensors'; a shard must be a safetensors file beside",
    ),
    "index is absolute": (lambda s: _place(s, "model.norm.weight", "/etc/passwd"), "'/etc/passwd'; a shard must be"),
    "index has NUL": (lambda s: _place(s, "model.norm.weight", "a\0.safetensors"), r"'a\\x00.safetensors'; a shard"),
    "index names a pickle": (lambda s: _place(s, "model.norm.weight", "pytorch_model.bin"), "a shard must be a safet"),
    "shard is a folder": (
        lambda s: (min(s.glob("*.safetensors")).unlink(), (s / "model-00001-of-00012.safetensors").mkdir()),
        "model-00001-of-00012.safetensors: cannot be read",
    ),
    "shard is a link to nowhere": (
        lambda s: (min(s.glob("*.safetensors")).unlink(), (s / "model-00001-of-00012.safetensors").symlink_to("gone")),
        "shard model-00001-of-00012.safetensors is missing",
    ),
    "shard is an LFS pointer": (
        lambda s: min(s.glob("*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00"),
        "a Git LFS pointer in place of the file.*git lfs pull",
    ),
    "header twice": (_with_header(lambda h: h[:-1] + "," + h[h.index('"', 30) :]), "is there twice"),
    "header with NUL": (_with_header(lambda h: h.replace("lm_head", "lm\\u0000head")), r"'lm\\x00head.* is no name"),
    "header of a dtype": (_with_header(lambda h: h.replace("BF16", "F4")), "dtype 'F4', which is not known here"),
    "header overlaps": (_with_header(lambda h: h.replace("[0,", "[2,")), "takes .* bytes, its offsets are"),
    "header of a shape": (_with_header(lambda h: h.replace('"shape":[', '"shape":[-1,')), "has shape"),
    "header no JSON": (_with_header(lambda h: h[:-1]), "its header: "),
    "header a list": (_with_header(lambda h: f"[{h}]"), "is damaged"),
    "index missing": (lambda s: (s / checkpoint_io.INDEX).unlink(), "holds neither model.safetensors nor"),
    "config missing": (lambda s: (s / "config.json").unlink(), "source: config.json is missing"),
    "config corrupt": (lambda s: (s / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_sources(how: str, tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    damage, match = BROKEN[how]
    damage(source)
    refused(match, lambda: qq.quantize_checkpoint(source, tmp_path / "out"), tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already; quantize the original BF16.* by fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "is quantized already.* by mxfp4"),
        ({"compression_config": {"format": "int"}}, "is quantized already.* by compression_config"),
        ({"hidden_size": 80}, r"weight has shape \[.*\], which does not go with config.json"),
        ({"architectures": ["logging"]}, "cannot build logging from config.json"),
        ({"architectures": ["Qwen9MoeForCausalLM"]}, r"must name an architecture of transformers .*Qwen9Moe"),
        ({"architectures": None}, r"must name an architecture of transformers .*, got architectures=\[\]"),
        ({"hidden_size": "wide"}, "cannot build Qwen3MoeForCausalLM from config.json"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* more weights of Qwen3MoeForCausalLM are missing"),
    ],
)
def test_configs_that_do_not_fit(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config(SOURCE) | change), "utf-8")
    refused(match, lambda: qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out"), tmp_path)


def test_other_bad_arguments(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("no such directory", lambda: qq.quantize_checkpoint(tmp_path / "nobody", out))
    refused(
        "W4A4 checkpoint needs activation scales", lambda: qq.quantize_checkpoint(SOURCE, out, activations="observed")
    )
    refused(
        "cannot be written in the compressed",
        lambda: qq.quantize_checkpoint(SOURCE, out, dialect="compressed-tensors", recipe="modelopt"),
    )
    refused(
        r"no module with weights matches '.*nobody'; names are like 'model\.layers\.0\.self_attn\.q_proj'$",
        lambda: qq.quantize_checkpoint(SOURCE, out, exclude=["*nobody"]),
    )
    refused("config.json is missing", lambda: qq.export_checkpoint(dense(), out, dialect="modelopt", source=tmp_path))
    assert list(tmp_path.iterdir()) == []
