"""What ``diagnose`` found: numbers, a table for terminals, and a figure."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from quads_qat.compare import COMPUTE_IN
from quads_qat.gap import GapStats
from quads_qat.gemm_noise import Noise

PARTS = ("delta", "delta_weight", "delta_act", "delta_num")


@dataclass(frozen=True)
class OutputError:
    """How far the outputs of a layer or module differ, over all tokens.

    ``norm(difference) / norm(the trainer's output)``: of the whole (``total``, rollout against trainer) and of what
    each swap changed. They contain what came in wrong already, and do not add up, since differences cancel.
    """

    name: str
    total: float
    weight: float
    act: float
    num: float


@dataclass(frozen=True)
class GemmError:
    """What quantization does in one weight's GEMMs, on the inputs that they get in the trainer.

    Attributes:
        name: of the parameter; a stack of experts is one.
        layer: the layer that it is in; "" outside of all.
        rows: of the input that were seen; 0 for experts that no token reached.
        local_error: ``norm(y_rollout - y_trainer) / norm(y_trainer)`` for the same input and the same arithmetic.
        weight_error: ``norm(W_rollout - W_trainer) / norm(W_trainer)``; 0 where both multiply by the same bits.
        weight: of the rollout's weight, against the trainer's master weight; None if it is not quantized.
        activation: of the rollout's first quantization of the input; None if it leaves activations alone.
        compensated: ``norm(x - Q(x) - Q(residual)) / norm(x)``: what is left after the residual; None likewise.
    """

    name: str
    layer: str
    rows: int
    local_error: float
    weight_error: float
    weight: Noise | None
    activation: Noise | None
    compensated: float | None


@dataclass(frozen=True)
class ChannelError:
    """An input channel of a GEMM in which trainer and rollout differ.

    Attributes:
        name: of the parameter.
        channel: index along K.
        cause: ``act``, what the rollout makes of the input against what the trainer does, or ``weight``.
        share: of the energy that all channels of this GEMM cause, weights and activations together.
        error: ``norm(what it causes) / norm(y)``, channels taken as independent.
    """

    name: str
    channel: int
    cause: str
    share: float
    error: float


@dataclass(frozen=True)
class RouterFlips:
    """How often trainer and rollout send a token to another set of experts.

    Attributes:
        name: of the experts module.
        rate: share of tokens whose top-k sets differ.
        slots: share of the top-k slots whose expert is not among the other side's.
    """

    name: str
    rate: float
    slots: float


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """Where the log-prob gap between a trainer and a rollout comes from; see :func:`~quads_qat.diagnose.diagnose`.

    Attributes:
        delta, delta_weight, delta_act, delta_num: float64 [B, C], per token, NaN where it does not count. At every
            token ``delta_weight + delta_act + delta_num == delta``, exactly.
        gap: statistics of each of the four, by these names. ``k1`` adds up too, but for rounding;
            maxima and means of magnitudes do not.
        positions: mean magnitude of each at each of the C positions, over the rows; None where no row counts.
        layers: error of each decoder layer's output, in the order of the model.
        modules: error of the output of every linear and expert stack that sees each token once.
        gemms: quantization noise of every weight that either side quantizes.
        routers: flips in every expert stack that is given the indices of its experts.
        channels: the worst input channels, worst first.
        other_weights: tensors that neither side quantizes and that differ, in the trainer's dtype; their effect is part
            of ``delta_weight``. A weight sync that forgot them shows here.
        cast_weights: those of them that are equal after a cast of the trainer's, and its dtype: fp32 masters that the
            trainer multiplies by as they are, while export and rollout round them.
    """

    delta: Tensor
    delta_weight: Tensor
    delta_act: Tensor
    delta_num: Tensor
    gap: dict[str, GapStats]
    positions: dict[str, list[float | None]]
    layers: list[OutputError]
    modules: list[OutputError]
    gemms: list[GemmError]
    routers: list[RouterFlips]
    channels: list[ChannelError]
    other_weights: list[str]
    cast_weights: dict[str, str]

    def top_modules(self, n: int = 10) -> list[GemmError]:
        """The n weights whose GEMMs are furthest from the trainer's for the same input, worst first."""
        return sorted(self.gemms, key=lambda gemm: -gemm.local_error)[:n]

    def to_dict(self, *, tokens: bool = False) -> dict[str, Any]:
        """Numbers, strings, lists and None only, for JSON; what is not finite becomes None.

        Args:
            tokens: also the four deltas of every token, as ``tokens``.
        """
        value = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in PARTS}
        value["gap"] = {part: stats.to_dict() for part, stats in self.gap.items()}
        for name in ("layers", "modules", "gemms", "routers", "channels"):
            value[name] = [asdict(entry) for entry in value[name]]
        if tokens:
            value["tokens"] = {part: getattr(self, part).tolist() for part in PARTS}
        return _finite(value)

    def table(self, rows: int = 8) -> Any:
        """Tables for ``rich``: the gap and its parts, layers, and the ``rows`` worst modules and channels."""
        from rich.console import Group

        return Group(*_tables(self, rows))

    def __rich__(self) -> Any:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=100, color_system=None, force_jupyter=False).print(self)
        return file.getvalue().rstrip()

    __repr__ = __str__

    def plot(self) -> Any:
        """A matplotlib figure: the gap over positions and over layers, router flips, and the noise of each GEMM."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2)
        _plot_positions(axes[0, 0], self)
        _plot_layers(axes[0, 1], self.layers or self.modules)
        _plot_flips(axes[1, 0], self.routers)
        _plot_gemms(axes[1, 1], self.gemms)
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.spines[["top", "right"]].set_visible(False)
        return figure


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------------------------------- tables


_LEGEND = (
    "W: the rollout's weight, x: its input. output: error of the GEMM's output for the trainer's input. W differs: the "
    "rollout's weight against the one that the trainer multiplies by. dead: share of nonzero values that became 0. "
    "noise: norm(x - Q(x)) / norm(x); of W against the master weight."
)


def _tables(found: Diagnosis, rows: int) -> Iterable[Any]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    def table(title: str, first: str, headings: Iterable[str], lines: Iterable[tuple[str, ...]]) -> Any:
        # without frames, the widest numbers and 24 letters of a name are 80 columns
        made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        made.add_column(first, overflow="fold", min_width=24)
        for heading in headings:
            made.add_column(heading, justify="right", no_wrap=True)
        for line in lines:
            made.add_row(*line)
        return made

    gap = (
        (part, f"{s.max:.4g}", f"{s.mean:.4g}", f"{s.k1:+.4g}", f"{s.k3:.4g}", f"{s.share_over_ln2:.2%}")
        for part, s in found.gap.items()
    )
    title = f"log pi_rollout - log pi_trainer over {found.gap['delta'].tokens} tokens"
    yield table(title, "part", ("max", "mean", "k1", "k3", "> ln 2"), gap)
    layers = [
        (e.name, _number(e.total), _number(e.weight), _number(e.act), _number(e.num), _flips(found, e.name))
        for e in found.layers
    ]
    if layers:
        headings = ("total", "weight", "act", "num", "router flips")
        yield table("\nrelative error of the layers' outputs", "layer", headings, layers)
    if found.gemms:
        lines = [
            (_module(g.name), _number(g.local_error), _number(g.weight_error), *_cells(g.weight), *_cells(g.activation))
            for g in found.top_modules(rows)
        ]
        headings = ("output", "W\ndiffers", "W\ndead", "W\nnoise", "x\ndead", "x\nnoise")
        yield table("\nthe modules with the largest error of their own", "weight", headings, lines)
        yield _LEGEND
    if found.channels:
        lines = [
            (_module(c.name), str(c.channel), c.cause, _number(c.error), f"{c.share:.1%}")
            for c in found.channels[:rows]
        ]
        yield table("\nthe worst input channels", "weight", ("channel", "cause", "error", "of the\nmodule's"), lines)
    if found.cast_weights:
        names, dtype = [*found.cast_weights], next(iter(found.cast_weights.values()))
        yield (
            f"{_not_quantized(names)} by the cast to {dtype} alone: the trainer multiplies by fp32 masters; "
            f"train under {dtype} ({COMPUTE_IN.format(dtype)})"
        )
    if stale := [name for name in found.other_weights if name not in found.cast_weights]:
        yield f"{_not_quantized(stale)}: a stale weight sync?"


def _module(weight: str) -> str:
    """The name of a linear itself: what ``exclude`` takes, and short enough for a line of 80 columns."""
    return weight.removesuffix(".weight") or weight


def _not_quantized(names: list[str]) -> str:
    shown = f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    if len(names) == 1:
        return f"1 tensor {shown} that is not quantized differs"
    return f"{len(names)} tensors {shown} that are not quantized differ"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}" if value < 1e-3 else f"{value:.4f}"


def _cells(noise: Noise | None) -> tuple[str, str]:
    return ("", "") if noise is None else (f"{noise.dead_zone:.1%}", _number(noise.grid_noise))


def _flips(found: Diagnosis, layer: str) -> str:
    return ", ".join(f"{r.rate:.1%}" for r in found.routers if r.name == layer or r.name.startswith(f"{layer}."))


# --------------------------------------------------------------------------------------------------------------- figure


def _plot_positions(axis: Any, found: Diagnosis) -> None:
    for part, style in zip(PARTS, ("k-", "C0-", "C1-", "C2-"), strict=True):
        curve = [math.nan if value is None else value for value in found.positions[part]]
        axis.plot(curve, style, label=part, linewidth=1.0)
    axis.set(title="gap by position", xlabel="position", ylabel="mean |delta|")
    axis.legend(frameon=False, fontsize=8)


def _plot_layers(axis: Any, errors: list[OutputError]) -> None:
    for part, style in zip(("total", "weight", "act", "num"), ("k.-", "C0.-", "C1.-", "C2.-"), strict=True):
        axis.plot([getattr(error, part) for error in errors], style, label=part)
    axis.set(title="relative error of outputs", xlabel="layer", ylabel="norm ratio")
    if errors:
        axis.legend(frameon=False, fontsize=8)


def _plot_flips(axis: Any, routers: list[RouterFlips]) -> None:
    axis.bar(range(len(routers)), [100 * router.rate for router in routers], color="C3")
    axis.set(title="router flips", xlabel="expert layer", ylabel="tokens, %")
    if not routers:
        axis.text(0.5, 0.5, "no routers", transform=axis.transAxes, ha="center", color="gray")


def _plot_gemms(axis: Any, gemms: list[GemmError]) -> None:
    for what, color in (("weight", "C0"), ("activation", "C1")):
        noise = [getattr(gemm, what) for gemm in gemms]
        axis.plot([math.nan if n is None else n.grid_noise for n in noise], f"{color}.", label=f"{what}: grid noise")
        axis.plot([math.nan if n is None else n.dead_zone for n in noise], f"{color}x", label=f"{what}: dead zone")
    axis.plot([gemm.local_error for gemm in gemms], "k_", label="error of the output")
    axis.set(title="noise of the GEMMs", xlabel="quantized weight", ylabel="ratio")
    axis.legend(frameon=False, fontsize=8)
