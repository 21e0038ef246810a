"""Contract under test: ``quantize_checkpoint`` names all tensors that it copies and that hold NaN or inf, whichever
run copied them, and says so again where the checkpoint is there already."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, rewritten, tensors
from safetensors.torch import load_file
from tiny_models import tiny_model

import quads_qat as qq
from quads_qat import quantize as module
from quads_qat.record import RECORD
from quads_qat.resume import JOURNAL

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"
FIRST, SECOND, LAST = (
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.norm.weight",
)
OPTIONS: dict[str, Any] = {"shard_bytes": 20_000, "workers": 1}


class Killed(BaseException):
    pass


def said(source: Path, out: Path, **options: Any) -> tuple[bool, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = qq.quantize_checkpoint(source, out, **(OPTIONS | options))
    return made, [str(w.message) for w in found if "NaN" in str(w.message)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A source with NaN and inf in its first and last shards."""
    change = {name: tensors(SOURCE)[name].clone() for name in (FIRST, SECOND, LAST)}
    for tensor, value in zip(change.values(), (torch.nan, torch.inf, -torch.inf), strict=True):
        tensor[0] = value
    return rewritten(SOURCE, tmp_path / "bad", change)


def test_all_are_said_after_kills_and_when_all_is_there(bad: Path, tmp_path: Path) -> None:
    expected = [f"{bad}: {FIRST} and 2 more hold NaN or inf; not quantized, copied as it is"]
    assert said(bad, tmp_path / "whole") == (True, expected)
    out = tmp_path / "out"
    for share in (0.3, 0.7):

        def kill(done: int, total: int, share: float = share) -> None:
            if done > share * total:
                raise Killed

        with pytest.raises(Killed):
            said(bad, out, progress=kill)
    assert (out / JOURNAL).exists()
    assert said(bad, out) == (True, expected)
    assert said(bad, out) == (False, expected)
    assert said(bad, out, workers=2) == (False, expected)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_kill_right_before_the_warning(bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(module.warnings, "warn", kill)
    with pytest.raises(Killed):
        qq.quantize_checkpoint(bad, tmp_path / "out", **OPTIONS)
    monkeypatch.undo()
    made, warned = said(bad, tmp_path / "out")
    assert (made, len(warned)) == (False, 1)
    assert f"{FIRST} and 2 more hold NaN or inf" in warned[0]


def test_a_shard_that_is_made_again_is_looked_at_again(bad: Path, tmp_path: Path) -> None:
    """Names of a shard that is gone are those of the new one, counted once."""
    out = tmp_path / "out"

    def kill(done: int, total: int) -> None:
        if done > 0.7 * total:
            raise Killed

    with pytest.raises(Killed):
        said(bad, out, progress=kill)
    for shard in out.glob("*.safetensors"):
        shard.unlink()
    made, warned = said(bad, out)
    assert made
    assert [w for w in warned if f"{FIRST} and 2 more hold" in w] == warned != []


def test_the_record_names_them_beside_their_shards_and_is_otherwise_as_ever(bad: Path, tmp_path: Path) -> None:
    said(bad, tmp_path / "out")
    said(SOURCE, tmp_path / "sound")
    files = json.loads((tmp_path / "out" / RECORD).read_text("utf-8"))["files"]
    named = {file: entry["not_finite"] for file, entry in files.items() if "not_finite" in entry}
    assert sorted(name for names in named.values() for name in names) == sorted([FIRST, SECOND, LAST])
    for file, names in named.items():
        assert set(names) <= load_file(tmp_path / "out" / file).keys()
    assert "not_finite" not in (tmp_path / "sound" / RECORD).read_text("utf-8")


@pytest.mark.parametrize("wrong", ['"a"', "[1]", "{}", "null"])
def test_names_that_cannot_be_read(wrong: str, bad: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said(bad, out)
    record = (out / RECORD).read_text("utf-8")
    (out / RECORD).write_text(re.sub(r'"not_finite": \[[^]]*\]', f'"not_finite": {wrong}', record), "utf-8")
    with pytest.raises(ValueError, match=f"{RECORD} cannot be read .*; remove it if you do not need it"):
        said(bad, out)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_biases_of_experts_are_looked_at_whether_they_are_split_or_not(dialect: str, tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    model.save_pretrained(tmp_path / "sound")
    names = [f"model.layers.{i}.mlp.experts.{leaf}_proj_bias" for i, leaf in ((0, "down"), (1, "gate_up"))]
    for name, value in zip(names, (torch.nan, torch.inf), strict=True):
        with torch.no_grad():
            model.get_parameter(name)[:, -1] = value  # of every expert: one name all the same
    model.save_pretrained(tmp_path / "bad")
    assert said(tmp_path / "sound", tmp_path / "a", dialect=dialect) == (True, [])
    expected = [f"{tmp_path / 'bad'}: {names[0]} and 1 more hold NaN or inf; not quantized, copied as it is"]
    assert said(tmp_path / "bad", tmp_path / "out", dialect=dialect) == (True, expected)
    assert said(tmp_path / "bad", tmp_path / "out", dialect=dialect) == (False, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_copied_and_is_not_finite_is_said(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    stored, names = tensors(SOURCE), ("model.layers.1.input_layernorm.weight", "model.norm.weight")
    change = {name: stored[name].to(dtype) for name in names}
    source = rewritten(SOURCE, tmp_path / "source", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qq.quantize_checkpoint(source, tmp_path / "sound")
    change[names[0]][3] = value
    change[names[1]][-1] = value
    source = rewritten(SOURCE, tmp_path / "bad", change)
    with pytest.warns(UserWarning, match=rf"bad: {names[0]} and 1 more hold NaN or inf; not quantized, copied"):
        assert qq.quantize_checkpoint(source, tmp_path / "out", workers=2)
    out = tensors(tmp_path / "out")
    assert all(torch.equal(out[name].view(torch.uint8), change[name].view(torch.uint8)) for name in names)
