"""The ``quads-qat`` command line: thin over the library; a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import re
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from quads_qat import console
from quads_qat.config import ActivationScale, Dialect, Mode, Recipe, ResidualConfig, ResidualScope, Scope
from quads_qat.record import read_record

_UsageError = typer.BadParameter.__bases__[0]  # typer vendors click in some releases and imports it in others


class TrainerMode(str, Enum):
    """The modes of :class:`~quads_qat.config.Mode` that train."""

    W4A16 = Mode.W4A16.value
    W4A4 = Mode.W4A4.value


app = typer.Typer(
    name="quads-qat",
    help="NVFP4 checkpoints for QUADS: quantize, dequantize, verify, inspect, compare; and a demo of the whole job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", metavar="", help="Run model code that the checkpoint brings.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; default: one a core, at most 8.")]
Json = Annotated[
    bool, typer.Option("--json", metavar="", help="Print one machine-readable JSON object instead of tables.")
]
Names = Annotated[list[str] | None, typer.Option(help="Module name, glob or re:regex; may be given several times.")]


def main() -> None:
    """Entry point: library errors become one line and exit code 2, our warnings one line."""
    python_s, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:  # pyright: ignore[reportGeneralTypeIssues]
        fail(error.format_message() or "give a command")  # pyright: ignore[reportAttributeAccessIssue]
    except (ValueError, TypeError, OSError) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):  # releases of typer differ in what they make of Ctrl-C
        code = _INTERRUPTED
    finally:
        warnings.formatwarning = python_s
    if code == _INTERRUPTED:
        print("quads-qat: interrupted; run the same command again to continue", file=sys.stderr)
    raise SystemExit(code or 0)


_INTERRUPTED = 130
"""The exit code of a program that SIGINT ended."""


def _one_line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    plain = category is UserWarning or category.__module__.startswith("quads_qat")
    text = str(message) if plain else f"{category.__name__}: {message}"
    return f"warning: {' '.join(text.split())}\n"


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with 2."""
    print(f"quads-qat: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _print_version(asked: bool) -> None:
    from quads_qat import __version__

    if asked:
        print(f"quads-qat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """What comes before a command."""


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--out", help="Where checkpoints, table and plot go.")] = Path(
        "quads-qat-demo"
    ),
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of each of the three trainers.")] = 20,
    as_json: Json = False,
) -> None:
    """Train a small MoE three ways, export, verify, load in transformers, and measure the log-prob gap."""
    from quads_qat import demo as job

    console.quiet_transformers()
    with console.bar_of_steps(job.units(steps)) as advance:
        result = job.run(directory, steps, advance)
    console.print_json(result) if as_json else console.print_demo(result, directory)


RECIPE_HELP = (
    "Which arithmetic: aligned goes with both dialects, modelopt* with modelopt, llm-compressor with "
    "compressed-tensors, transformer-engine with none."
)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="BF16 checkpoint directory (safetensors).")],
    destination: Annotated[Path, typer.Argument(help="Directory to make, or to continue after an interruption.")],
    dialect: Annotated[Dialect, typer.Option(help="Which names and config engines find.")] = Dialect.MODELOPT,
    recipe: Annotated[Recipe, typer.Option(help=RECIPE_HELP)] = Recipe.ALIGNED,
    scope: Annotated[Scope, typer.Option(help="Which modules.")] = Scope.ALL,
    include: Names = None,
    exclude: Names = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", metavar="", help="W4A16: no activation scales.")
    ] = False,
    calibrate: Annotated[
        Path | None, typer.Option(help="W4A4: observe activations on this text file. Builds the model.")
    ] = None,
    activations_from: Annotated[
        Path | None, typer.Option(help="W4A4: take the activation scales of this NVFP4 checkpoint.")
    ] = None,
    residual_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Record for rollouts: share of channels that is compensated.")
    ] = None,
    residual_scope: Annotated[
        ResidualScope | None, typer.Option(help="Record for rollouts: over what those channels are ranked.")
    ] = None,
    activation_scale: Annotated[
        ActivationScale | None, typer.Option(help="Record for rollouts: over what they take an activation's scale.")
    ] = None,
    workers: Workers = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    max_shard_size: Annotated[str, typer.Option(help="Size of an output file.")] = "5GB",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Quantize a BF16 checkpoint into an NVFP4 one, however large. Run it again to continue after an interruption.

    One of --weights-only (W4A16), --calibrate and --activations-from (both W4A4) has to be given.
    """
    _check_activation_options(weights_only, calibrate, activations_from)
    from quads_qat.nvfp4_checkpoint import Checkpoint
    from quads_qat.quantize import quantize_checkpoint

    console.quiet_transformers()
    with console.bar_of_bytes(source.name) as progress:
        made = quantize_checkpoint(
            source,
            destination,
            dialect=dialect,
            recipe=recipe,
            scope=scope,
            include=include or (),
            exclude=exclude or (),
            activations="none" if activations_from is None else activations_from,
            calibrate=calibrate,
            residual=_residual(residual_fraction, residual_scope),
            activation_scale=activation_scale,
            shard_bytes=_bytes(max_shard_size),
            workers=workers,
            device=_device(device),
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    written = Checkpoint.open(destination)
    quantized, size = len(written.quantized()), written.reader.nbytes()
    facts: dict[str, Any] = {"dialect": dialect.value, "recipe": recipe.value, "quantized": quantized}
    console.print_written(destination, size, made, as_json, what=f"{quantized} weights quantized, ", **facts)


def _residual(fraction: float | None, scope: ResidualScope | None) -> ResidualConfig | None:
    """What the options ask for; None if they ask for nothing."""
    asked: dict[str, Any] = {"fraction": fraction, "scope": scope}
    asked = {name: value for name, value in asked.items() if value is not None}
    return ResidualConfig(**asked) if asked else None


def _check_activation_options(weights_only: bool, calibrate: Path | None, activations_from: Path | None) -> None:
    given = [name for name, path in (("--calibrate", calibrate), ("--activations-from", activations_from)) if path]
    if weights_only and given:
        fail(
            f"quantize: --weights-only writes no activation scales (W4A16), so {given[0]} has nothing to do; drop "
            f"--weights-only for a W4A4 checkpoint, or {' and '.join(given)} for a W4A16 one"
        )
    if len(given) == 2:
        fail("quantize: activation scales come from --calibrate or from --activations-from, not from both; drop one")
    if not weights_only and not given:
        fail(
            "quantize: a W4A4 checkpoint needs activation scales, which weights alone do not give; pass --weights-only "
            "for a W4A16 checkpoint, or one of --calibrate and --activations-from for a W4A4 one"
        )


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B", size.strip().upper())
    if match is None or not float(match[1]):
        fail(f"--max-shard-size must be a number > 0 with KB, MB, GB or TB, got {size!r}")
    return max(1, int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))


def _device(name: str) -> str:
    import torch

    if name.split(":")[0] not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {name!r}")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(f"--device {name} cannot be used: {str(error).splitlines()[0]}")
    return name


@app.command()
def dequantize(
    source: Annotated[Path, typer.Argument(help="NVFP4 checkpoint of either dialect, ours or others'.")],
    destination: Annotated[Path, typer.Argument(help="Directory to make, or to continue after an interruption.")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: config.json's.")] = None,
    workers: Workers = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Turn an NVFP4 checkpoint into a plain one, in the names that transformers loads."""
    import torch

    from quads_qat.recode import dequantize_checkpoint

    chosen = None if dtype is None else getattr(torch, dtype, dtype)
    console.quiet_transformers()
    with console.bar_of_bytes(source.name) as progress:
        made = dequantize_checkpoint(
            source,
            destination,
            dtype=chosen,  # pyright: ignore[reportArgumentType]
            workers=workers,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    console.print_written(destination, _file_bytes(destination), made, as_json)


@app.command()
def convert_dialect(
    source: Annotated[Path, typer.Argument(help="NVFP4 checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="Directory to make, or to continue after an interruption.")],
    dialect: Annotated[Dialect, typer.Option(help="Which names and config engines find.")],
    workers: Workers = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Write an NVFP4 checkpoint in the other dialect, without quantizing anew; refused where that would change bits."""
    from quads_qat.recode import convert_dialect as convert

    console.quiet_transformers()
    with console.bar_of_bytes(source.name) as progress:
        options: dict[str, Any] = {"workers": workers, "trust_remote_code": trust_remote_code, "progress": progress}
        made = convert(source, destination, dialect=dialect, **options)
    console.print_written(destination, _file_bytes(destination), made, as_json)


def _file_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@app.command()
def verify(
    source: Annotated[Path, typer.Argument(help="BF16 checkpoint that was quantized.")],
    destination: Annotated[Path, typer.Argument(help="NVFP4 checkpoint.")],
    recipe: Annotated[Recipe | None, typer.Option(help="Arithmetic; default: what the checkpoint records.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Check, bit for bit, that an NVFP4 checkpoint is what its source quantizes to. Exit code 1 if not."""
    from quads_qat.verify import verify_checkpoint

    console.quiet_transformers()
    report = verify_checkpoint(source, destination, recipe=recipe, trust_remote_code=trust_remote_code)
    console.print_json(report.to_dict()) if as_json else console.out.print(str(report), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def inspect(directory: Annotated[Path, typer.Argument(help="NVFP4 checkpoint.")], as_json: Json = False) -> None:
    """Say what an NVFP4 checkpoint holds, and what is wrong with it. Exit code 1 if something is."""
    from quads_qat.compare import inspect_checkpoint

    console.quiet_transformers()
    summary = inspect_checkpoint(directory) | {"made_by": _made_by(directory)}
    console.print_json(summary) if as_json else console.print_inspection(summary)
    if summary["problems"]:
        raise typer.Exit(1)


def _made_by(directory: Path) -> list[str]:
    """The command, and the names that it was given; [] where the checkpoint has no record."""
    job = (read_record(directory) or ({},))[0]
    names = (f"{key}: {', '.join(map(str, job[key]))}" for key in ("include", "exclude") if job.get(key))
    return [str(job["command"]), *names] if "command" in job else []


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="NVFP4 checkpoint.")],
    b: Annotated[Path, typer.Argument(help="NVFP4 checkpoint of either dialect.")],
    as_json: Json = False,
) -> None:
    """Compare two NVFP4 checkpoints tensor by tensor. Exit code 1 if they differ."""
    from quads_qat.compare import diff as compare

    rows = compare(a, b)
    if as_json:
        only = rows.only_activation_scales
        console.print_json({"equal": not rows, "only_activation_scales": only, "differences": rows})
    else:
        console.out.print(str(rows), soft_wrap=True, highlight=False)
    if rows:
        raise typer.Exit(1)


@app.command()
def diagnose(
    trainer: Annotated[Path, typer.Argument(help="BF16 checkpoint, or an NVFP4 one, whose weights are decoded.")],
    rollout: Annotated[Path, typer.Argument(help="NVFP4 checkpoint.")],
    text: Annotated[Path, typer.Option(help="Text file on which both are compared.")],
    mode: Annotated[TrainerMode | None, typer.Option(help="Convert the BF16 trainer first.")] = None,
    residual_fraction: Annotated[
        float | None,
        typer.Option(
            "--residual-fraction",
            "--fraction",
            min=0,
            max=1,
            help="Share of channels that the rollout compensates; default: what is recorded.",
        ),
    ] = None,
    residual_scope: Annotated[
        ResidualScope | None, typer.Option(help="Over what those channels are ranked; default: what is recorded.")
    ] = None,
    rollout_dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a row.")] = 512,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the text.")] = 4,
    plot: Annotated[Path | None, typer.Option(help="Where to save the figure: .png, .pdf or .svg.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Split the log-prob gap between a trainer and a rollout into weights, activations and arithmetic."""
    import torch

    from quads_qat.diagnose_files import diagnose_checkpoints

    if rollout_dtype not in (None, "bfloat16", "float16", "float32"):
        fail(f"--rollout-dtype must be bfloat16, float16 or float32, got {rollout_dtype!r}")
    if plot is not None and plot.suffix not in (".png", ".pdf", ".svg"):
        fail(f"--plot must end in .png, .pdf or .svg, got {plot}")
    console.quiet_transformers()
    device = _device(device)
    with console.err.status("running both models"):
        found = diagnose_checkpoints(
            trainer,
            rollout,
            text,
            mode=None if mode is None else Mode(mode.value),
            residual=_residual(residual_fraction, residual_scope),
            rollout_dtype=None if rollout_dtype is None else getattr(torch, rollout_dtype),
            length=length,
            rows=rows,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    if plot is not None:
        temporary = plot.with_name(f".{plot.stem}.partial{plot.suffix}")
        found.plot().savefig(temporary, dpi=150)
        temporary.replace(plot)
    console.print_json(found.to_dict()) if as_json else console.out.print(found)
