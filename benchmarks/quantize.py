"""The element-wise kernels on a CUDA GPU, beside a device copy of the same bytes and other packages, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import quantize_peers
from benchmarks.cuda_timing import Call, Times, copies_of, in_turn
from benchmarks.quantize_peers import DEQUANTIZE, FAKE_QUANTIZE, QUANTIZE, Prepare
from benchmarks.registry import GpuReport, Report, Row, benchmark
from quads_qat import ops, reference
from quads_qat.qtensor import NVFP4Tensor

#: A large weight, two stacks of experts, a small weight; one block and none, for what a launch and a call cost.
SHAPES = ((16384, 8192), (128, 1536, 2048), (128, 2048, 768), (2048, 4096), (1, 16), (0, 16))
#: Peers are measured from this size on.
PEERS_FROM = 1 << 20


@dataclass(frozen=True)
class Kernel:
    """One of our functions.

    Attributes:
        run: (``ops`` or ``reference``, the tensor or its codes, amax) -> result.
        bytes_per_element: read and written.
        takes_codes: instead of the tensor.
    """

    run: Callable[[ModuleType, Tensor | NVFP4Tensor, Tensor], object]
    bytes_per_element: float
    takes_codes: bool = False


def _dim(x: Tensor | NVFP4Tensor) -> tuple[int, int] | None:
    """A stack of experts has one amax each."""
    return (1, 2) if len(x.shape) == 3 else None


KERNELS = {
    "amax": Kernel(lambda m, x, _: m.amax(x, dim=_dim(x)), 2),
    FAKE_QUANTIZE: Kernel(lambda m, x, amax: m.fake_quantize(x, tensor_amax=amax), 4),
    "amax + fake_quantize": Kernel(lambda m, x, _: m.fake_quantize(x, tensor_amax=m.amax(x, dim=_dim(x))), 6),
    QUANTIZE: Kernel(lambda m, x, amax: m.quantize(x, tensor_amax=amax), 2.5625),
    DEQUANTIZE: Kernel(lambda m, q, _: m.dequantize(q), 2.5625, takes_codes=True),
}


@dataclass(frozen=True)
class KernelRow(Row):
    """``seconds`` is the device's time alone, None where no graph can hold the call.

    Attributes:
        called: seconds of a call from Python.
        copy: seconds of a device copy that moves as many bytes, as ``seconds``.
        moved: bytes read and written.
    """

    called: float | None = None
    copy: float | None = None
    moved: int = 0


@dataclass
class KernelReport(GpuReport):
    """Our kernels, each followed by the peers that do the same work."""

    @property
    def header(self) -> tuple[str, ...]:
        return ("kernel", "us", "copy us", "of a copy", "called us", "time / ours", "note")

    @property
    def legend(self) -> str:
        return (
            "Medians of all rounds. us: the device alone, calls replayed as one CUDA graph over inputs that no cache "
            "holds; copy us: a device copy that moves the same bytes, likewise; of a copy: copy us / us; called us: as "
            "called from Python, the host's time where that is longer; time / ours: of us. No graph can hold a call "
            "that waits for the GPU: both ratios are then of called us. [1, 16] is one block: what a launch costs the "
            "device and Python; [0, 16] has none: what a call costs without the kernel"
        )

    def cells(self) -> list[tuple[str, ...]]:
        ours = {row.name: row for row in self.rows}
        return [_cells(row, ours.get(row.ours)) for row in self.rows]


def _cells(row: Row, ours: Row | None) -> tuple[str, ...]:
    if not isinstance(row, KernelRow) or row.called is None:
        return (row.name, "-", "-", "-", "-", "-", row.note)
    ratio = ""
    if isinstance(ours, KernelRow) and ours.called is not None:
        times = row.called / ours.called
        if row.seconds is not None and ours.seconds is not None:
            times = row.seconds / ours.seconds
        ratio = f"{times:.2f}"
    of_copy = "-" if row.copy is None else f"{row.copy / (row.seconds or row.called):.3f}"
    return (row.name, _us(row.seconds), _us(row.copy), of_copy, _us(row.called), ratio, row.note)


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


@benchmark("quantize")
def quantize(rounds: int = 7, peers: bool = True, seed: int = 0) -> Report:
    """amax, fake_quantize, quantize and dequantize in bf16 with Recipe.ALIGNED on a CUDA GPU, beside other packages."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: 'quantize' needs a CUDA GPU; 'quantize-cpu' does not")
    return measured("cuda", SHAPES, rounds, peers, seed)


@torch.no_grad()
def measured(
    device: str, shapes: tuple[tuple[int, ...], ...], rounds: int, peers: bool = True, seed: int = 0
) -> KernelReport:
    """The report of :func:`quantize`."""
    report = KernelReport(
        "NVFP4 kernels, bf16, Recipe.ALIGNED",
        unit_count=1,
        unit="calls",
        packages=("torch", "triton", *(quantize_peers.PACKAGES if peers else ())),
        settings={"rounds": rounds, "seed": seed},
    )
    progress = Console(stderr=True)
    loaded, missing = _load(quantize_peers.PEERS if peers else {})
    generator = torch.Generator(device).manual_seed(seed)
    for shape in shapes:
        x = (torch.randn(shape, device=device, generator=generator) * 0.02).bfloat16()
        for name, kernel in KERNELS.items():
            same_work = {n: p for n, p in loaded.items() if quantize_peers.PEERS[n].kernel == name}
            for row in _rows(name, kernel, x, same_work if x.numel() >= PEERS_FROM else {}, rounds):
                progress.print(" | ".join(_cells(row, None)), highlight=False, soft_wrap=True)
                report.rows.append(row)
    report.rows += missing
    return report


def _load(peers: dict[str, quantize_peers.Peer]) -> tuple[dict[str, Prepare], list[Row]]:
    """The peers that are installed, and a row for each that is not."""
    loaded, missing = {}, []
    for name, peer in peers.items():
        try:
            loaded[name] = peer.load()
        except ImportError as error:
            missing.append(Row(name, None, note=f"skipped: {error}"))
    return loaded, missing


def _rows(name: str, kernel: Kernel, x: Tensor, peers: dict[str, Prepare], rounds: int) -> Iterator[Row]:
    """Check the bits, then time our kernel, a copy and the peers against each other."""
    amax = reference.amax(x, dim=_dim(x))
    given = reference.quantize(x, tensor_amax=amax) if kernel.takes_codes else x
    label = f"[{', '.join(map(str, x.shape))}]"
    ours = f"{name} {label}"
    moved = int(kernel.bytes_per_element * x.numel())
    calls: dict[str, list[Call]] = {}
    if _same(kernel.run(ops, given, amax), kernel.run(reference, given, amax)):
        copies = [given, *(_clone(given) for _ in range(1, copies_of(given.nbytes)))]
        calls[ours] = [partial(kernel.run, ops, copy, amax) for copy in copies]
    else:
        yield Row(ours, None, note="bits differ from the reference: no time")
    if moved:
        calls["copy"] = _copies(moved, x.device)
    notes, failed = {ours: ""}, []
    for peer, prepare in peers.items():
        key = f"{peer} {label}"
        try:
            calls[key], notes[key] = _peer_calls(peer, prepare, x)
        except Exception as error:  # whatever it is, it is the peer's, and the other rows stand
            reason = str(error).partition("\n")[0]
            failed.append(Row(key, None, note=f"failed: {type(error).__name__}: {reason}"))
    times = in_turn(calls, rounds, graphs=bool(moved))
    copy = times.pop("copy", Times(None, 0.0)).device
    for key, time in times.items():
        of = "" if key == ours else ours
        yield KernelRow(key, time.device, of, notes[key], called=time.called, copy=copy, moved=moved)
    yield from failed


def _peer_calls(name: str, prepare: Prepare, x: Tensor) -> tuple[list[Call], str]:
    """The peer's call on one copy of ``x`` after the other, and whose bits it has."""
    peer = quantize_peers.PEERS[name]
    flat = x.flatten(0, -2)  # peers know one scale a tensor
    amax = reference.amax(flat)
    note = quantize_peers.bits_of(prepare(flat, amax)(), flat, amax)
    nbytes = flat.nbytes * 0.5625 / 2 if KERNELS[peer.kernel].takes_codes else flat.nbytes
    copies = [flat, *(flat.clone() for _ in range(1, copies_of(int(nbytes))))]
    return [prepare(copy, amax) for copy in copies], "; ".join(filter(None, (note, peer.note)))


def _copies(moved: int, device: torch.device) -> list[Call]:
    """Device copies that read half of ``moved`` bytes and write the other half."""
    nbytes = moved // 2
    pairs = [torch.empty(2, nbytes, dtype=torch.uint8, device=device) for _ in range(copies_of(nbytes))]
    return [partial(target.copy_, source) for source, target in pairs]


def _clone(given: Tensor | NVFP4Tensor) -> Tensor | NVFP4Tensor:
    if isinstance(given, Tensor):
        return given.clone()
    scales = given.per_tensor_scale, given.recipe, given.stored_scale
    return NVFP4Tensor(given.qdata.clone(), given.block_scale.clone(), *scales)


def _same(actual: object, expected: object) -> bool:
    if isinstance(actual, NVFP4Tensor) and isinstance(expected, NVFP4Tensor):
        scales = actual.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8)
        pairs = ((actual.qdata, expected.qdata), scales, (actual.per_tensor_scale, expected.per_tensor_scale))
        return all(torch.equal(a, b) for a, b in pairs)
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))
