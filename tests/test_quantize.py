"""Contract under test: ``quantize_checkpoint`` on checkpoints as they are published: hundreds of shards, stacks of
experts too large to hold, tensors of several dtypes, code and templates.
"""

import gc
import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, rewritten, tensors
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import quads_qat as qq
from quads_qat import Dialect, checkpoint_io
from quads_qat import quantize as quantize_module
from quads_qat.demo import DATA
from quads_qat.record import RECORD

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"
dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_sharded(target: Path, stored: dict[str, Tensor], files: Iterable[list[str]]) -> None:
    """Shards with the given names, and their index."""
    weight_map = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}.safetensors"
        save_file({name: stored[name].contiguous() for name in names}, target / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    assert weight_map.keys() == stored.keys()
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items(), key=lambda item: item[0][::-1]))}
    (target / checkpoint_io.INDEX).write_text(json.dumps(index), "utf-8")


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more than 200 tensors in one file."""
    source = tmp_path_factory.mktemp("one") / "source"
    tiny_model("qwen3_moe", seed=1).save_pretrained(source)
    stored = tensors(source)
    layers = [n for n in stored if n.startswith("model.layers.1.")]
    more = {n.replace(".1.", f".{i}.", 1): stored[n].clone() for n in layers for i in range(2, 10)}
    save_file(stored | more, source / "model.safetensors", {"format": "pt"})
    changed = config(source) | {"num_hidden_layers": 10, "max_window_layers": 10}
    changed["layer_types"] = ["full_attention"] * 10 if changed.get("layer_types") else None
    (source / "config.json").write_text(json.dumps(changed), "utf-8")
    return source


@pytest.fixture(scope="module")
def many_files(one_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, each tensor in a file of its own: no scale group is in one."""
    target = tmp_path_factory.mktemp("many") / "source"
    shutil.copytree(one_file, target, ignore=shutil.ignore_patterns("*.safetensors"))
    stored = tensors(one_file)
    assert len(stored) > 200
    write_sharded(target, stored, [[name] for name in sorted(stored, key=lambda n: hashlib.md5(n.encode()).digest())])
    return target


@dialects
def test_hundreds_of_shards_give_the_files_that_one_gives(
    dialect: Dialect, one_file: Path, many_files: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dialect": dialect, "shard_bytes": 20_000}
    for source, out, workers in ((one_file, "a", 1), (many_files, "b", 2), (many_files, "c", 5)):
        qq.quantize_checkpoint(source, tmp_path / out, workers=workers, **options)
    made = [contents(tmp_path / out) for out in ("a", "b", "c")]
    assert made[1] == made[2]
    assert len({files.pop(RECORD) for files in made}) == 2  # which says what source it is of
    assert made[0] == made[1]
    assert qq.verify_checkpoint(many_files, tmp_path / "a").ok

    index = json.loads((tmp_path / "a" / checkpoint_io.INDEX).read_text("utf-8"))
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 10
    placed, total = {}, 0
    for file in files:
        with safe_open(tmp_path / "a" / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            placed |= dict.fromkeys(shard.keys(), file)
            size = sum(shard.get_tensor(name).nbytes for name in shard.keys())  # noqa: SIM118
        assert size <= 20_000
        total += size
    assert index == {"metadata": {"total_size": total}, "weight_map": placed}
    for name, file in placed.items():  # a linear's tensors, and what shares its scale, are in one file
        if name.endswith("q_proj.weight_scale"):
            assert placed[name.replace("q_proj", "v_proj")] == placed[name.removesuffix("_scale") + "_scale"] == file


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "mixtral", "qwen3_moe", "nemotron_h"])
@dialects
def test_large_groups_are_read_twice_with_the_same_bytes(
    dialect: Dialect, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model(name).save_pretrained(tmp_path / "source")
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "held", dialect=dialect)
    monkeypatch.setattr(quantize_module, "HELD_BYTES", 0)
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "twice", dialect=dialect, workers=3)
    assert contents(tmp_path / "held") == contents(tmp_path / "twice")
    assert qq.verify_checkpoint(tmp_path / "source", tmp_path / "twice").ok


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        *((name, "model.") for name in ("qwen3_moe", "qwen3_5_moe", "mixtral", "nemotron_h")),
        ("qwen3_5_moe", "model.language_model."),
    ],
)
@dialects
def test_experts_that_are_3d_in_the_source(dialect: Dialect, name: str, prefix: str, tmp_path: Path) -> None:
    """As some publish them; the result has the names and bytes of a source with one tensor for each expert."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "single")
    stacked = shutil.copytree(tmp_path / "single", tmp_path / "stacked")
    stored = tensors(stacked)
    for parameter, tensor in model.state_dict().items():
        if tensor.ndim == 3 and parameter.rpartition(".")[0].endswith("experts"):
            layer = re.search(r"\.layers\.\d+\.", parameter)[0]  # pyright: ignore
            base = next(n for n in stored if layer in n and _of_an_expert(n)).split(".experts.")[0]
            stored[f"{base}.experts.{parameter.rpartition('.')[2]}"] = tensor
    stored = {n: t for n, t in stored.items() if not _of_an_expert(n)}
    renamed = {n.replace("model.", prefix, 1) if n.startswith("model.") else n: t for n, t in stored.items()}
    save_file({n: t.clone() for n, t in renamed.items()}, stacked / "model.safetensors", {"format": "pt"})
    qq.quantize_checkpoint(tmp_path / "single", tmp_path / "a", dialect=dialect)
    qq.quantize_checkpoint(stacked, tmp_path / "b", dialect=dialect)
    ours = {n.replace(prefix, "model.", 1): t for n, t in tensors(tmp_path / "b").items()}
    expected = tensors(tmp_path / "a")
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(ours[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
    assert qq.verify_checkpoint(stacked, tmp_path / "b").ok


def _of_an_expert(name: str) -> bool:
    return re.search(r"\.experts\.\d+\.", name) is not None


def peak_growth(call: Callable[[], None]) -> int:
    """Bytes by which the resident memory of a forked process grows while ``call`` runs."""
    gc.collect()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            call()
            os.write(write, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        grown = pipe.read()
    os.waitpid(pid, 0)
    return 1024 * int(grown)


def test_memory_is_that_of_a_scale_group(tmp_path: Path) -> None:
    """128 MB of weights in one stack of experts, 18 MB of codes; the process grows by a few experts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 8192}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=8)).bfloat16()
    model.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config(tmp_path) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}), "utf-8"
    )
    stored = {n: torch.zeros(t.shape, dtype=t.dtype).add_(0.5) for n, t in model.state_dict().items()}
    total = sum(t.nbytes for t in stored.values())
    write_sharded(tmp_path, stored, [list(stored)])
    del stored, model
    assert total > 140e6
    (tmp_path / "out").mkdir()
    grown = peak_growth(lambda: qq.quantize_checkpoint(tmp_path, tmp_path / "out", workers=2, shard_bytes=10**9))
    assert qq.verify_checkpoint(tmp_path, tmp_path / "out").ok
    assert grown < 60e6, f"grew by {grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of weights"


def test_the_disk_is_checked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    qq.quantize_checkpoint(SOURCE, tmp_path / "out")
    usage, room = shutil.disk_usage(tmp_path), sum(len(data) for data in contents(tmp_path / "out").values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    qq.quantize_checkpoint(SOURCE, tmp_path / "enough")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(room * 0.85)))
    with pytest.raises(ValueError, match=r"little: needs about"):
        qq.quantize_checkpoint(SOURCE, tmp_path / "little")
    assert not (tmp_path / "little").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"calibrate": Path("nothing.txt")}, r"nothing\.txt: cannot be read as text to calibrate on"),
        ({"calibrate": DATA / "model.safetensors"}, "cannot be read as text to calibrate on"),
        ({"activation_scale": "static"}, "needs activation scales in the file, and activations='none' writes none"),
        (
            {"calibrate": [torch.zeros(1, 4, dtype=torch.int64)], "activations": CHECKPOINTS},
            "from calibrate or from activations, not from both",
        ),
        (
            {"activations": CHECKPOINTS / "modelopt" / "qwen3moe-w4a16_nvfp4"},
            "input_scale is missing; activation scales",
        ),
        ({"activations": SOURCE}, "this is no NVFP4 checkpoint"),
        ({"activations": "observed"}, "pass calibrate=, or activations= as a mapping or the Path of"),
        ({"workers": 0}, "workers must be an integer >= 1, got 0"),
        ({"shard_bytes": 0}, "shard_bytes must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        qq.quantize_checkpoint(SOURCE, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


# What lies beside the weights.


def test_companions(tmp_path: Path) -> None:
    source = shutil.copytree(SOURCE, tmp_path / "source")
    carried = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "x",
        "additional_chat_templates/tools.jinja": "y",
        "modeling_own.py": "import os",
        "own/part.py": "1",
        "own/deep/part.py": "2",
        "tokenizer.model": "3",
    }
    left = {
        ".hidden": "",
        "pytorch_model.bin": "",
        "own/notes.txt": "",
        "optimizer.pt": "",
        "pytorch_model.bin.index.json": "{}",
    }
    left |= {".git/hooks/run.py": "", "consolidated.safetensors": ""}
    for file, text in (carried | left).items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text, "utf-8")
    (tmp_path / "blob").write_text("linked", "utf-8")
    (source / "vocab.txt").symlink_to(tmp_path / "blob")  # as in the cache of the Hub
    qq.quantize_checkpoint(source, tmp_path / "out")
    written = contents(tmp_path / "out")
    assert {name: written[name].decode() for name in carried} == carried
    assert written["vocab.txt"] == b"linked"
    assert not (tmp_path / "out" / "vocab.txt").is_symlink()
    assert not left.keys() & written.keys()
    (tmp_path / "blob").unlink()
    with pytest.raises(ValueError, match=r"vocab\.txt is a link that leads nowhere"):
        qq.quantize_checkpoint(source, tmp_path / "again")


def test_code_of_the_checkpoint_runs_only_when_it_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = shutil.copytree(SOURCE, tmp_path / "source")
    (source / "modeling_own.py").write_text(
        "from pathlib import Path\nfrom transformers import Qwen3MoeForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\nclass OwnForCausalLM(Qwen3MoeForCausalLM): pass\n",
        "utf-8",
    )
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (source / "config.json").write_text(json.dumps(config(SOURCE) | own), "utf-8")
    match = (
        r"OwnForCausalLM is not in transformers .*\(modeling_own.OwnForCausalLM\). Read it, then .*--trust-remote-code"
    )
    with pytest.raises(ValueError, match=match):
        qq.quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    qq.quantize_checkpoint(source, tmp_path / "out", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    qq.quantize_checkpoint(SOURCE, tmp_path / "plain")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    assert (tmp_path / "out" / "modeling_own.py").exists()
    for load in (qq.load_model, qq.load_rollout):
        with pytest.raises(ValueError, match=match):
            load(tmp_path / "out")
        assert type(load(tmp_path / "out", trust_remote_code=True)).__name__ == "OwnForCausalLM"
    with pytest.raises(ValueError, match=match):
        qq.verify_checkpoint(source, tmp_path / "out")
    assert qq.verify_checkpoint(source, tmp_path / "out", trust_remote_code=True).ok

    elsewhere = own | {"auto_map": {"AutoModelForCausalLM": "someone/model--modeling_own.OwnForCausalLM"}}
    (source / "config.json").write_text(json.dumps(config(SOURCE) | elsewhere), "utf-8")
    with pytest.raises(ValueError, match="takes its model code from another repository"):
        qq.quantize_checkpoint(source, tmp_path / "more", trust_remote_code=True)


# Sources that are no BF16 checkpoint.

NAME = "model.layers.1.mlp.experts.2.up_proj"
SIGNS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "GPTQ": ({f"{NAME}.weight": None, f"{NAME}.qweight": torch.zeros(4, 4, dtype=torch.int32)}, "by GPTQ or AWQ"),
    "FP8 in blocks": ({f"{NAME}.weight_scale_inv": torch.ones(1, 1)}, "by FP8 in blocks"),
    "FP8": (
        {f"{NAME}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)},
        f"{NAME}.weight is torch.float8_e4m3fn; only",
    ),
    "MXFP4": ({"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(4, dtype=torch.uint8)}, "by MXFP4"),
    "NVFP4": ({f"{NAME}.weight_packed": torch.zeros(4, dtype=torch.uint8)}, "by compressed-tensors"),
    "bitsandbytes": ({f"{NAME}.weight.absmax": torch.zeros(4)}, "by bitsandbytes"),
    "int8": ({f"{NAME}.weight": torch.zeros(32, 64, dtype=torch.int8)}, f"{NAME}.weight is torch.int8; only"),
}


@pytest.mark.parametrize("how", SIGNS)
def test_what_is_quantized_already_is_refused(how: str, tmp_path: Path) -> None:
    change, match = SIGNS[how]
    source = rewritten(SOURCE, tmp_path / "source", change)
    with pytest.raises(ValueError, match=match):
        qq.quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_files_of_other_quantizers(file: str, tmp_path: Path) -> None:
    source = shutil.copytree(SOURCE, tmp_path / "source")
    (source / file).write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=f"is quantized already; .*{file}"):
        qq.quantize_checkpoint(source, tmp_path / "out")


def test_mixed_dtypes_are_cast_as_loading_casts_them(tmp_path: Path) -> None:
    """q in fp32 and k in fp16 of a bf16 model: one scale group, of the values that the loaded model has."""
    from transformers import AutoModelForCausalLM

    stored, prefix = tensors(SOURCE), "model.layers.0.self_attn"
    torch.manual_seed(0)
    change = {
        f"{prefix}.q_proj.weight": torch.randn(stored[f"{prefix}.q_proj.weight"].shape),
        f"{prefix}.k_proj.weight": torch.randn(stored[f"{prefix}.k_proj.weight"].shape).half(),
    }
    source = rewritten(SOURCE, tmp_path / "source", change)
    qq.quantize_checkpoint(source, tmp_path / "files")
    model = qq.convert(AutoModelForCausalLM.from_pretrained(source), "w4a16")
    qq.export_checkpoint(model, tmp_path / "model", dialect="modelopt", source=source)
    ours, expected = tensors(tmp_path / "files"), tensors(tmp_path / "model")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert qq.verify(model, tmp_path / "files").ok


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_not_quantized_of_a_source_in_fp32_is_cast_as_an_export_casts_it(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece; unless the architecture keeps it in fp32, or the source is of several dtypes."""
    torch.manual_seed(0)
    stored = {name: torch.randn(tensor.shape) for name, tensor in tensors(SOURCE).items()}
    source = rewritten(SOURCE, tmp_path / "source", stored)
    monkeypatch.setattr("quads_qat.safetensors_file._PIECE", 64)
    monkeypatch.setattr(PreTrainedModel, "_keep_in_fp32_modules_strict", {"mlp.gate"})
    qq.quantize_checkpoint(source, tmp_path / "out", workers=workers)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items() if name in stored)
    trainer = qq.convert(model, "w4a16")
    qq.export_checkpoint(trainer, tmp_path / "exported", dialect="modelopt", source=source)
    ours, expected = tensors(tmp_path / "out"), tensors(tmp_path / "exported")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(ours[name], tensor, name)
    assert {ours[f"model.layers.1.{n}.weight"].dtype for n in ("mlp.gate", "input_layernorm")} == {
        torch.float32,
        torch.bfloat16,
    }
    assert qq.verify(trainer, tmp_path / "out").ok
    assert qq.verify_checkpoint(source, tmp_path / "out").ok
    stored["model.norm.weight"] = stored["model.norm.weight"].bfloat16()
    mixed = rewritten(SOURCE, tmp_path / "mixed", stored)
    qq.quantize_checkpoint(mixed, tmp_path / "copied")
    assert_same_bits(tensors(tmp_path / "copied")["lm_head.weight"], stored["lm_head.weight"])
    assert qq.verify_checkpoint(mixed, tmp_path / "copied").ok


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@dialects
def test_a_source_in_fp32_announces_what_its_weights_decode_to(dialect: Dialect, key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / "qwen3", dtype=torch.float32).save_pretrained(source)
    original = config(source)
    original[key] = original.pop("dtype")
    assert original[key] == "float32"
    (source / "config.json").write_text(json.dumps(original), "utf-8")
    out = tmp_path / "out"
    assert qq.quantize_checkpoint(source, out, dialect=dialect)
    written = config(out)
    assert {k: written[k] for k in original} == original | {key: "bfloat16"}
    assert qq.verify_checkpoint(source, out).ok
    assert not qq.quantize_checkpoint(source, out, dialect=dialect)  # its record has no quarrel with that
    trainer = qq.convert(AutoModelForCausalLM.from_pretrained(source), "w4a16")
    qq.export_checkpoint(trainer, tmp_path / "exported", dialect=dialect)
    assert not qq.diff(out, tmp_path / "exported")  # what is not quantized is cast as well
    assert qq.verify(trainer, out).ok
    ids = torch.arange(12)[None]
    with qq.patch_transformers(), torch.no_grad():
        loaded, expected = (AutoModelForCausalLM.from_pretrained(path) for path in (out, tmp_path / "exported"))
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    for load in (qq.load_model, qq.load_rollout):
        assert load(out).dtype == torch.bfloat16
