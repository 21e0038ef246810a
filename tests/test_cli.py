"""The command line: results, JSON, exit codes, and one-line errors."""

import io
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file

import quads_qat as qq
from quads_qat import cli, console
from quads_qat.demo import DATA
from quads_qat.engine_limits import EngineWarning


@dataclass
class Done:
    """What a call left behind."""

    returncode: int
    stdout: str
    stderr: str


def quads_qat(*arguments: object) -> Done:
    """Call the entry point in this process, as the installed script does."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["quads-qat", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
    ):
        cli.main()
    return Done(exit_.value.code or 0, out.getvalue(), err.getvalue())


def assert_one_line_error(done: Done, message: str) -> None:
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("quads-qat: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped model, quantized into both dialects by the command line."""
    folder = tmp_path_factory.mktemp("cli")
    paths = {dialect: folder / dialect for dialect in ("modelopt", "compressed-tensors")}
    for dialect, path in paths.items():
        done = quads_qat("quantize", DATA, path, "--weights-only", "--dialect", dialect, "--json")
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["dialect"], summary["recipe"], summary["quantized"]) == (dialect, "aligned", 112)
    return paths


def test_our_warnings_are_one_line():
    before = warnings.formatwarning
    assert quads_qat("--help").returncode == 0
    assert warnings.formatwarning is before
    assert cli._one_line(EngineWarning("no\nscale"), EngineWarning, "export.py", 3) == "warning: no scale\n"
    assert cli._one_line("no tokenizer", UserWarning, "diagnose.py", 3) == "warning: no tokenizer\n"
    assert cli._one_line("old", FutureWarning, "x.py", 1, line="x") == "warning: FutureWarning: old\n"


def test_a_finished_checkpoint_is_not_made_again(checkpoints: dict[str, Path], tmp_path: Path):
    done = quads_qat("quantize", DATA, checkpoints["modelopt"], "--weights-only")
    assert done.returncode == 0, done.stderr
    assert "already complete, 112 weights quantized" in done.stdout
    for command in (("dequantize",), ("convert-dialect", "--dialect", "compressed-tensors")):
        arguments = (command[0], checkpoints["modelopt"], tmp_path / command[0], *command[1:], "--json")
        said = [json.loads(quads_qat(*arguments).stdout)["already_complete"] for _ in range(2)]
        assert said == [False, True]
    done = quads_qat("quantize", DATA, checkpoints["modelopt"], "--weights-only", "--scope", "mlp")
    assert_one_line_error(done, "exists already; remove it or choose another destination (it was made otherwise: scope")


def test_inspect_of_what_is_not_finished(tmp_path: Path):
    (tmp_path / ".quads_qat.journal").write_text("{}")
    assert_one_line_error(
        quads_qat("inspect", tmp_path), "is not finished (0 shards are there). If no process is making"
    )


def test_verify_says_equal(checkpoints: dict[str, Path]):
    for path in checkpoints.values():
        done = quads_qat("verify", DATA, path, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"ok": True, "quantized": 112, "other": 23, "differences": {}}


def test_verify_names_the_tensor_that_differs(checkpoints: dict[str, Path], tmp_path: Path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in checkpoints["modelopt"].iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    tensors[name][3, 7] ^= 1
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    done = quads_qat("verify", DATA, damaged)
    assert done.returncode == 1
    assert name in done.stdout.replace("\n", "")
    done = quads_qat("diff", checkpoints["modelopt"], damaged, "--json")
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["differences"]
    assert (row["name"], row["codes"], row["block_scales"], row["values"]) == (name, 1, 0, 1)
    (line,) = quads_qat("diff", checkpoints["modelopt"], damaged).stdout.splitlines()[1:]
    assert re.fullmatch(rf"  {re.escape(name)}: 1 codes, 1 values, max \|a - b\| [\d.e-]+", line)


def test_our_own_checkpoint_is_not_quantized_again(checkpoints: dict[str, Path], tmp_path: Path):
    done = quads_qat("quantize", checkpoints["modelopt"], tmp_path / "out", "--weights-only")
    assert_one_line_error(done, "is quantized already; quantize the original BF16 checkpoint. It was made by quads_qat")


def test_diff_across_dialects_is_empty(checkpoints: dict[str, Path]):
    done = quads_qat("diff", checkpoints["modelopt"], checkpoints["compressed-tensors"], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"equal": True, "only_activation_scales": False, "differences": []}


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_diff_of_w4a4_and_w4a16_lists_activation_scales(dialect: str, data_dir: Path, tmp_path: Path):
    """It listed every weight with zero codes, zero scales and zero values that differ."""
    source, peer = (data_dir / "checkpoints" / name for name in ("bf16/qwen3", "modelopt/qwen3-nvfp4"))
    for name, options in (("w4a4", ("--activations-from", peer)), ("w4a16", ("--weights-only",))):
        done = quads_qat("quantize", source, tmp_path / name, *options, "--dialect", dialect)
        assert done.returncode == 0, done.stderr
    done = quads_qat("diff", tmp_path / "w4a16", tmp_path / "w4a4")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "weights are the same, bit for bit; 14 activation scales differ:"
    assert len(lines) == 15
    line = next(line for line in lines if "layers.0.self_attn.q_proj" in line)
    assert re.fullmatch(r"  \S+q_proj\.weight: amax of the activation scale none against \d+\.\d+", line)
    assert json.loads(quads_qat("diff", tmp_path / "w4a16", tmp_path / "w4a4", "--json").stdout)[
        "only_activation_scales"
    ]


def test_dequantize_and_the_other_dialect(checkpoints: dict[str, Path], tmp_path: Path):
    done = quads_qat("convert-dialect", checkpoints["modelopt"], tmp_path / "ct", "--dialect", "compressed-tensors")
    assert done.returncode == 0, done.stderr
    expected = load_file(checkpoints["compressed-tensors"] / "model.safetensors")
    made = load_file(tmp_path / "ct" / "model.safetensors")
    assert made.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in made.items() if tensor.dtype.itemsize > 1)
    done = quads_qat("dequantize", tmp_path / "ct", tmp_path / "plain", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] == (tmp_path / "plain" / "model.safetensors").stat().st_size
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == load_file(DATA / "model.safetensors").keys()
    assert str(plain["model.layers.0.self_attn.q_proj.weight"].dtype) == "torch.float32"
    assert_one_line_error(
        quads_qat("dequantize", tmp_path / "ct", tmp_path / "x", "--dtype", "int4"), "dtype must be bfloat16, float16"
    )


def test_inspect_reports_and_finds_problems(checkpoints: dict[str, Path], data_dir: Path):
    done = quads_qat("inspect", checkpoints["compressed-tensors"], "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["weights"], summary["recipe"], summary["quantized_elements"]) == ("W4A16", "aligned", 7077888)
    assert summary["problems"] == []
    done = quads_qat("inspect", data_dir / "checkpoints" / "modelopt" / "qwen3moe-nvfp4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights"] == "W4A4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", DATA, "{tmp}/out"), "pass --weights-only"),
        (
            ("quantize", DATA, "{tmp}/out", "--weights-only", "--calibrate", "x"),
            "--calibrate has nothing to do",
        ),
        (
            ("quantize", DATA, "{tmp}/out", "--weights-only", "--activations-from", "x"),
            "-from has nothing to do",
        ),
        (("quantize", DATA, "{tmp}/out", "--calibrate", "x", "--activations-from", "x"), "not from both; drop one"),
        (
            ("quantize", DATA, "{tmp}/out", "--weights-only", "--activation-scale", "static"),
            "pass activations='observed' (q",
        ),
        (("quantize", DATA, "{tmp}/out", "--calibrate", "{tmp}/x"), "cannot be read as text to calibrate on"),
        (("quantize", DATA, "{tmp}/out", "--activations-from", DATA), "this is no NVFP4 checkpoint"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--workers", "0"), "workers"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--max-shard-size", "5"), "got '5'"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--max-shard-size", "0MB"), "must be a number > 0"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--device", "meta"), "must be cpu or cuda, got 'meta'"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--device", "cuda:99"), "--device cuda:99 cannot be used"),
        (("quantize", "{tmp}/nothing", "{tmp}/out", "--weights-only"), "nothing: no such directory"),
        (
            ("quantize", "Qwen/Qwen3-30B-A3B", "{tmp}/out", "--weights-only"),
            "no such directory; if this is a model of the Hugging Face Hub, download it and give its directory: "
            "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B",
        ),
        (("quantize", DATA, DATA, "--weights-only"), "source and destination are the same directory; choose another"),
        (("quantize", DATA, "{tmp}/a/b", "--weights-only"), "no such directory; create it first"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--recipe", "foo"), "'foo' is not one of 'aligned'"),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--recipe", "llm-compressor"), "use 'aligned', 'modelopt'"),
        (
            ("quantize", DATA, "{tmp}/out", "--weights-only", "--recipe", "llm-compressor"),
            ", or the dialect compressed-tensors (dialect=, --dialect)",
        ),
        (("quantize", DATA, "{tmp}/out", "--weights-only", "--exclude", "nothing.*"), "no module with weights matches"),
        (("verify", DATA, DATA), "this is no NVFP4 checkpoint"),
        (("inspect", DATA), "this is no NVFP4 checkpoint"),
        (("diff", DATA, DATA), "this is no NVFP4 checkpoint"),
        (("dequantize", DATA, "{tmp}/out"), "this is no NVFP4 checkpoint"),
        (("convert-dialect", DATA, "{tmp}/out", "--dialect", "modelopt"), "this is no NVFP4 checkpoint"),
        (("convert-dialect", DATA, "{tmp}/out"), "dialect"),
        (("demo", "--steps", "1"), "steps"),
        (("unknown",), "unknown"),
        ((), "give a command"),
        (("quantize",), "ource"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[object, ...], message: str, tmp_path: Path):
    assert_one_line_error(quads_qat(*(str(a).replace("{tmp}", str(tmp_path)) for a in arguments)), message)
    assert list(tmp_path.iterdir()) == []


def test_quantize_takes_activation_scales_and_shows_rate_and_remaining_time(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    shown = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=True, width=100))
    source, peer = (
        Path(__file__).parent / "data" / "checkpoints" / name for name in ("bf16/qwen3", "modelopt/qwen3-nvfp4")
    )
    arguments = ("--recipe", "modelopt-ieee", "--activations-from", peer, "--max-shard-size", "1.5mb", "--json")
    done = quads_qat("quantize", source, tmp_path / "out", *arguments)
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[n].float(), t.float()) for n, t in load_file(peer / "model.safetensors").items())
    assert re.search(r"qwen3.*\d/\d+(\.\d+)? [kM]?B.*\d:\d\d:\d\d", shown.getvalue())


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interruption_says_how_to_continue(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("quads_qat.quantize.quantize_checkpoint", mock.Mock(side_effect=error))
    done = quads_qat("quantize", DATA, tmp_path / "out", "--weights-only")
    assert done.returncode == 130
    assert done.stderr.endswith("quads-qat: interrupted; run the same command again to continue\n")


def test_inspect_shows_which_names_were_chosen(tmp_path: Path):
    out = tmp_path / "out"
    names = ("--exclude", "*o_proj", "--exclude", "*k_proj", "--include", "lm_head", "--scope", "mlp")
    assert quads_qat("quantize", DATA, out, "--weights-only", *names).returncode == 0
    made = json.loads(quads_qat("inspect", out, "--json").stdout)["made_by"]
    assert made == ["quantize", "include: lm_head", "exclude: *o_proj, *k_proj"]


def test_version_and_short_help(capsys: pytest.CaptureFixture[str]):
    assert quads_qat("--version").stdout == f"quads-qat {qq.__version__}\n"
    for command in ((), ("quantize",)):
        short, long = (quads_qat(*command, option) for option in ("-h", "--help"))
        assert short.returncode == long.returncode == 0
        assert "Usage:" in long.stdout
        assert short.stdout == long.stdout
    flags = [line for line in long.stdout.splitlines() if re.match(r"\W*--(weights-only|json|trust)", line)]
    assert len(flags) == 3
    assert not any("bool" in line for line in flags)


def test_the_module_is_the_command_line():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "120"}
    command = [sys.executable, "-m", "quads_qat", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("demo", "quantize", "verify", "inspect", "diff"))


def test_demo_runs_and_keeps_the_papers_order(tmp_path: Path):
    done = quads_qat("demo", "--out", tmp_path / "demo", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "demo" / "result.json").read_text())
    assert all("are equal, bit for bit" in report for report in result["checkpoints"].values())
    assert len(result["checkpoints"]) == 4
    assert result["transformers"]["equal_with_patch"]
    assert (tmp_path / "demo" / "gap.png").read_bytes().startswith(b"\x89PNG")
    kl = {(g["trainer"], g["rollout"]): g["kl"] for g in result["gaps"]}
    naive, compensated = "naive W4A4", "W4A4 + residual 50 %"
    assert kl["W4A16 QAT", compensated] < 0.2 * kl["W4A16 QAT", naive]
    assert kl["W4A16 QAT", compensated] < 0.2 * min(kl["BF16", compensated], kl["W4A4 QAT", naive])
    assert_one_line_error(quads_qat("demo", "--out", tmp_path / "demo", "--steps", "4"), "is not empty")
