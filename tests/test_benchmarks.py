"""The benchmarks check bits before they measure, and their command line shows what they found."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from benchmarks import cuda_timing, engine, export_cpu, quantize, quantize_cpu, quantize_peers, weight_sync
from benchmarks.__main__ import app
from benchmarks.cuda_timing import Times
from benchmarks.matmul import _packed
from benchmarks.quantize_peers import FAKE_QUANTIZE, QUANTIZE, Peer
from benchmarks.registry import BENCHMARKS, benchmark
from quads_qat import ops, reference
from quads_qat.config import Recipe
from quads_qat.qtensor import NVFP4Tensor


def test_a_peer_with_other_bytes_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    def wrong(weight: torch.Tensor):
        rows, columns = weight.shape
        return torch.zeros(rows, columns // 2).byte(), torch.zeros(rows, columns // 16).byte(), torch.ones(())

    def missing():
        raise ImportError("No module named 'peer'")

    peers = {"wrong": (lambda: wrong, Recipe.MODELOPT_IEEE), "missing": (missing, Recipe.ALIGNED)}
    monkeypatch.setattr(quantize_cpu, "PEERS", peers)
    rows = {row.name: row for row in quantize_cpu.quantize_cpu(rows=16, columns=32, rounds=1).rows}
    assert rows["wrong"].seconds is None
    assert "bytes differ from modelopt-ieee" in rows["wrong"].note
    assert rows["missing"].seconds is None
    assert rows["missing"].note == "skipped: No module named 'peer'"
    assert all(rows[f"quads_qat {recipe}"].seconds for recipe in Recipe)


def test_a_sync_with_other_bytes_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    rows = weight_sync.weight_sync(layers=1, experts=2, hidden=256, rounds=1).rows
    assert len(rows) == 8
    assert all(row.seconds and row.note.endswith(" s/GB") for row in rows)
    monkeypatch.setattr(weight_sync, "differing_bytes", lambda rollout, expected: 3)
    rows = weight_sync.weight_sync(layers=1, experts=2, hidden=512, rounds=1).rows
    assert [row.note for row in rows if row.seconds is None] == [
        "not timed: 3 bytes differ from a fresh conversion"
    ] * 4


def test_the_command_line_writes_what_it_shows(tmp_path: Path):
    arguments = [
        "run",
        "quantize-cpu",
        "--rows",
        "16",
        "--columns",
        "64",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "a/b"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Quantize a 16 x 64 bf16 weight" in result.output
    written = json.loads((tmp_path / "a/b.json").read_text())
    assert written["settings"] == {"rows": 16, "columns": 64, "rounds": 1, "seed": 0}
    table = (tmp_path / "a/b.md").read_text()
    assert all(f"| {row['name']} | " in table for row in written["rows"])


def test_names_are_unique():
    assert "quantize-cpu" in CliRunner().invoke(app, ["list"]).output
    with pytest.raises(ValueError, match="'quantize-cpu' is registered twice"):
        benchmark("quantize-cpu")(BENCHMARKS["quantize-cpu"])


# ---------------------------------------------------------------------------------------------- the kernels and peers

SHAPES = ((4, 64), (2, 3, 32))


def ours_and(name: str, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> dict[str, quantize.Row]:
    """Rows of the benchmark on a CPU with one peer; a made-up clock gives calls that wait no device time."""

    def clock(calls, rounds: int, *, graphs: bool):
        for sequence in calls.values():
            sequence[-1]()
        return {n: Times(None if "waits" in n or not graphs else 2e-6 * (1 + i), 9e-6) for i, n in enumerate(calls)}

    monkeypatch.setattr(quantize, "in_turn", clock)
    monkeypatch.setattr(quantize, "PEERS_FROM", 1)
    monkeypatch.setattr(quantize, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(quantize_peers, "PEERS", {name: peer})
    report = quantize.measured("cpu", (*SHAPES, (0, 16)), rounds=1)
    table = report.as_markdown()
    assert all(f"| {row.name} | " in table for row in report.rows)
    assert {len(cells) for cells in report.cells()} == {len(report.header)}
    assert json.loads(report.as_json())["rows"][0]["moved"] == 2 * 4 * 64
    return {row.name: row for row in report.rows}


def cells(rows: dict[str, quantize.Row], name: str) -> dict[str, str]:
    report = quantize.KernelReport("", 1, "calls", rows=list(rows.values()))
    return next(dict(zip(report.header, c, strict=True)) for c in report.cells() if c[0] == name)


def modelopt_codes(x: torch.Tensor, amax: torch.Tensor):
    q = reference.quantize(x, tensor_amax=amax, recipe=Recipe.MODELOPT)
    return lambda: (q.qdata, q.block_scale)


def test_a_kernel_is_timed_beside_a_copy_and_a_peer(monkeypatch: pytest.MonkeyPatch):
    rows = ours_and("peer", Peer(QUANTIZE, lambda: modelopt_codes), monkeypatch)
    for name in quantize.KERNELS:
        assert cells(rows, f"{name} [4, 64]") | {"note": ""} == {
            "kernel": f"{name} [4, 64]",
            "us": "2.0",
            "copy us": "4.0",
            "of a copy": "2.000",
            "called us": "9.0",
            "time / ours": "",
            "note": "",
        }
    peer = cells(rows, "peer [2, 3, 32]")
    assert (peer["us"], peer["of a copy"], peer["time / ours"]) == ("6.0", "0.667", "3.00")
    assert "modelopt" in peer["note"]


def test_a_call_on_nothing_has_no_device_time(monkeypatch: pytest.MonkeyPatch):
    row = cells(ours_and("peer", Peer(QUANTIZE, lambda: modelopt_codes), monkeypatch), "dequantize [0, 16]")
    assert (row["us"], row["copy us"], row["of a copy"], row["called us"]) == ("-", "-", "-", "9.0")


def test_a_peer_that_waits_is_compared_as_called(monkeypatch: pytest.MonkeyPatch):
    rows = ours_and("waits", Peer(QUANTIZE, lambda: modelopt_codes, "less work"), monkeypatch)
    row = cells(rows, "waits [4, 64]")
    assert (row["us"], row["called us"], row["of a copy"], row["time / ours"]) == ("-", "9.0", "0.444", "1.00")
    assert row["note"].startswith("bits of modelopt")
    assert row["note"].endswith("; less work")


def test_a_peer_of_other_bits_is_timed_and_says_so(monkeypatch: pytest.MonkeyPatch):
    def one_off(x: torch.Tensor, amax: torch.Tensor):
        out = reference.fake_quantize(x, tensor_amax=amax, recipe=Recipe.LLM_COMPRESSOR)
        out.view(torch.int16).view(-1)[5] += 1
        return lambda: out

    row = cells(ours_and("peer", Peer(FAKE_QUANTIZE, lambda: one_off), monkeypatch), "peer [4, 64]")
    assert row["us"] == "6.0"
    assert row["note"] == "bits of no recipe: 0.0039 of the values differ from llm-compressor"


def test_a_missing_or_failing_peer_says_so(monkeypatch: pytest.MonkeyPatch):
    def missing():
        raise ImportError("No module named 'peer'")

    def failing(x: torch.Tensor, amax: torch.Tensor):
        raise RuntimeError("no such instruction\nand more")

    rows = ours_and("peer", Peer(QUANTIZE, missing), monkeypatch)
    assert (rows["peer"].seconds, rows["peer"].note) == (None, "skipped: No module named 'peer'")
    rows = ours_and("peer", Peer(QUANTIZE, lambda: failing), monkeypatch)
    assert rows["peer [4, 64]"].note == "failed: RuntimeError: no such instruction"
    assert cells(rows, "quantize, amax given [4, 64]")["us"] == "2.0"


def test_a_kernel_of_other_bits_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    right = ops.quantize

    def wrong(x: torch.Tensor, **options):
        q = right(x, **options)
        q.block_scale.view(torch.uint8).view(-1)[-1:] ^= 1
        return q

    monkeypatch.setattr(ops, "quantize", wrong)
    rows = ours_and("peer", Peer(QUANTIZE, lambda: modelopt_codes), monkeypatch)
    row = rows["quantize, amax given [2, 3, 32]"]
    assert (row.seconds, row.note) == (None, "bits differ from the reference: no time")
    assert cells(rows, "peer [2, 3, 32]")["time / ours"] == ""
    assert cells(rows, "dequantize [2, 3, 32]")["us"] == "2.0"


def test_inputs_that_take_turns_exceed_any_cache():
    for nbytes in (0, 32, 5_000_000, 16_777_216, 10**9):
        copies = cuda_timing.copies_of(nbytes)
        assert copies * nbytes >= 160_000_000 or copies == 64
        assert copies == 1 or (copies - 1) * nbytes < 160_000_000


@pytest.mark.gpu
def test_a_call_is_timed_by_a_graph_unless_it_waits():
    x = torch.randn(1 << 22, device="cuda")
    calls = {"adds": [lambda: x + 1] * 2, "waits": [lambda: x.sum().item()]}
    times = cuda_timing.in_turn(calls, rounds=2)
    assert times["waits"].device is None
    assert times["adds"].device is not None
    assert 0 < times["adds"].device < times["adds"].called
    assert cuda_timing.in_turn(calls, rounds=1, graphs=False)["adds"].device is None


def test_export_cpu_compares_bytes_before_it_times(monkeypatch: pytest.MonkeyPatch):
    def other_bytes(source: Path):
        def make(out: Path) -> dict[str, float]:
            tensors = load_file(source / "model.safetensors")
            out.mkdir()
            save_file({name: tensor + 1 for name, tensor in tensors.items()}, out / "model.safetensors")
            return {export_cpu.PEER: 1.0, export_cpu.EXPORT: 0.5}

        return make

    def missing(source: Path):
        raise ImportError("No module named 'peer'")

    sizes = {"layers": 1, "experts": 2, "hidden": 128, "intermediate": 32, "rounds": 1, "workers": 1}
    for peer, note in ((other_bytes, "not timed: .* names differ"), (missing, "skipped: No module named 'peer'")):
        monkeypatch.setattr(export_cpu, "_modelopt", peer)
        rows = {row.name: row for row in export_cpu.export_cpu(**sizes).rows}
        assert rows[export_cpu.WHOLE].seconds
        assert rows[export_cpu.PEER].seconds is None
        assert re.match(note, rows[export_cpu.PEER].note)
        assert export_cpu.EXPORT not in rows


def test_training_steps_are_compared_with_bf16_and_bits_come_first(monkeypatch: pytest.MonkeyPatch):
    from benchmarks import training

    sizes = {"hidden": 32, "intermediate": 32, "dense_hidden": 32, "dense_intermediate": 48, "tokens": 8, "layers": 2}
    report = training.training(rounds=1, experts=4, top_k=2, **sizes)
    rows = {row.name: row for row in report.rows}
    assert len(rows) == 19
    assert all(row.seconds for name, row in rows.items() if not name.startswith("nvidia"))
    monkeypatch.setattr(training, "_differs", lambda base, x: True)
    report = training.training(rounds=1, experts=4, top_k=2, **sizes)
    assert not any(row.seconds for row in report.rows if row.name.startswith("W4A16"))
    assert all("no time" in row.note for row in report.rows if row.name.startswith("W4A16"))


def test_several_gpus_without_gpus_give_the_bits_of_one_over_gloo(monkeypatch: pytest.MonkeyPatch):
    from benchmarks import multi_gpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"layers": 1, "experts": 4, "hidden": 512, "intermediate": 32, "tokens": 16, "rounds": 1, "syncs": 3}
    same, bf16, qat, *syncs = multi_gpu.multi_gpu(gpus=2, **sizes).rows
    assert same.note == "losses equal, exported bytes equal"
    assert bf16.seconds
    assert qat.seconds
    assert [row.name for row in syncs] == ["weight sync by broadcast", "weight sync by shared memory (CUDA IPC)"]
    assert all(row.seconds and "3 syncs bit-exact" in row.note for row in syncs)


@pytest.mark.parametrize("policy", engine.POLICIES)
def test_what_the_vllm_plugin_calls_is_inside_the_bound_and_wrong_products_are_not(policy: str):
    x, residual = torch.randn(5, 64).bfloat16(), engine.POLICIES[policy]
    weight = ops.quantize(torch.randn(32, 64))
    y, terms = engine.applied(x, weight, residual), engine.terms_of(x, residual)
    assert len(terms) == (2 if policy == "compensated" else 1)
    assert not engine.outside(y, terms, weight, partial_sums=False)
    for wrong in (y * 1.02, torch.full_like(y, torch.nan), y.roll(1, 0)):
        assert engine.outside(wrong, terms, weight, partial_sums=False)
        assert engine.outside(wrong * 1.05, terms, weight, partial_sums=True)


@pytest.mark.parametrize("fault", ["none", "wrong product", "does not compile", "no graph holds it"])
def test_a_humming_that_fails_or_is_wrong_costs_no_other_column(monkeypatch: pytest.MonkeyPatch, fault: str):
    def layer(w: NVFP4Tensor, rows: Sequence[int]):
        if fault == "does not compile":
            raise RuntimeError("NVRTCCompiler failed with exit code 1\nof many lines")
        factor = 1.25 if fault == "wrong product" else 1.0

        def call(x: torch.Tensor, expert_layout: torch.Tensor | None = None) -> torch.Tensor:
            assert len(x) in rows
            offs = None if expert_layout is None else expert_layout[1:].int()
            return factor * engine.applied(x, w, None, offs)

        return call

    def in_turn(calls: dict[str, Sequence[cuda_timing.Call]], rounds: int) -> dict[str, Times]:
        if fault == "no graph holds it" and engine.HUMMING in calls:
            raise RuntimeError("operation not permitted when stream is capturing")
        return dict.fromkeys(calls, Times(device=1.0, called=1.0))

    small = {"SHAPES": ((32, 64),), "EXPERT_SHAPES": ((32, 64),), "TOKENS": (3,), "EXPERT_TOKENS": (2,)}
    for name, sizes in small.items():
        monkeypatch.setattr(engine, name, sizes)
    monkeypatch.setattr(engine, "find_spec", lambda name: name)
    monkeypatch.setattr(engine, "humming_layer", layer)
    monkeypatch.setattr(engine, "in_turn", in_turn)
    rows = engine.measured("cpu", rounds=1, seed=0, humming=True).rows
    assert [row.name for row in rows] == ["linear [32, 64] M=3", "experts [128, 32, 64] tokens=2"]
    note = {
        "none": "",
        "wrong product": "Humming W4A16 is outside of the bound: no time",
        "does not compile": "Humming W4A16: RuntimeError: NVRTCCompiler failed with exit code 1",
        "no graph holds it": "Humming W4A16: RuntimeError: operation not permitted when stream is capturing",
    }[fault]
    for row in rows:
        assert isinstance(row, engine.EngineRow)
        assert row.note == note
        assert set(engine.COLUMNS) - set(row.times) == (set() if fault == "none" else {engine.HUMMING})


def test_experts_are_compared_with_their_own_weights():
    weight = _packed("cpu", 3, 32, 64)
    x, offs = torch.randn(6, 64).bfloat16(), torch.tensor([2, 2, 6], dtype=torch.int32)
    y = engine.applied(x, weight, None, offs)
    assert not engine.experts_outside(y, x, None, weight, offs, partial_sums=False)
    of_another = engine.applied(x, weight, None, torch.tensor([2, 3, 6], dtype=torch.int32))
    assert engine.experts_outside(of_another, x, None, weight, offs, partial_sums=True)
