"""Imports inside ``quads_qat`` point down the layers, never up and never in a circle.

Every import counts, whether at the top of a module, inside a function or under ``TYPE_CHECKING``. A module may import
from lower layers and from its own, with these exceptions: ``reference`` and ``kernels`` never meet, only ``library``,
``gemms`` and ``ops`` open the door to ``kernels``, and Triton stays behind that door.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quads_qat"

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "L0a",
        (
            *("formats", "packing", "qtensor", "config", "scale_groups", "selection", "names"),
            *("dialects", "engine_limits", "safetensors_file", "checkpoint_io", "resume", "output_shards", "skeleton"),
            "required_tensors",
            *("record", "name_ranges", "experts_layout"),
        ),
    ),
    ("L0b", ("reference", "reference_matmul", "kernels")),
    ("L1", ("checks", "library", "activations", "gemms", "no_gradient", "ops")),
    ("L2", ("sharding", "autograd", "adapters")),
    ("L3", ("experts_dispatch", "linear", "experts", "packed_module", "residual", "rollout_state")),
    (
        "L4",
        (
            *("bypasses", "convert", "quantized_weights", "coverage", "diagnose", "demo", "integrations"),
            *("tensor_parallel", "schedule"),
            *("diagnosis", "diagnose_files", "gap", "gemm_noise", "model_pair", "swaps"),
            *(
                "conversion",
                "select_weights",
                "contract",
                "checkpoint_plan",
                "weight_stream",
                "weight_sync",
                "export",
                "load",
                "nvfp4_checkpoint",
                "compare",
                "recode",
                "verify",
                "verify_config",
            ),
            *("sync_plan", "sync_ledger", "sync_layers", "sync_told", "state", "buckets"),
            *("quantize", "activation_scales"),
            *("first_step", "first_step_report", "received", "token_log_probs"),
        ),
    ),
    ("L5", ("console", "cli", "__main__")),
    ("top", ("__init__",)),  # may import anything; only L5, the programs, may import it
)
RANK = {unit: rank for rank, (_, units) in enumerate(LAYERS) for unit in units}
LAYER = {unit: layer for layer, units in LAYERS for unit in units}
FOLDERS = {"kernels", "integrations"}  # one unit of the table each; the files inside are free


def module_names(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name below ``quads_qat`` -> file; a package is ``name.__init__``, the root ``__init__``."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


def unit_of(module: str) -> str:
    return module.split(".")[0]


def imports(module: str, tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import: below ``quads_qat`` as in ``module_names``, else like ``:torch.nn``."""

    def resolve(dotted: str) -> str:
        root, _, inner = dotted.partition(".")
        if root != "quads_qat":
            return f":{dotted}"
        while inner and inner not in known and f"{inner}.__init__" not in known:
            if "." not in inner:
                return inner if inner in RANK else "__init__"  # a planned module, or a name that the root defines
            inner = inner.rpartition(".")[0]
        return inner if inner in known else f"{inner}.__init__".lstrip(".")

    here = ["quads_qat", *module.split(".")[:-1]]  # the package that a leading dot means
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, resolve(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, resolve(f"{source}.{alias.name}")) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                name = node.args[0].value
                yield node.lineno, resolve(".".join(here) + name if name.startswith(".") else name)


def violations(module: str, source: str, known: set[str]) -> list[str]:
    importer, found = unit_of(module), []
    for line, name in imports(module, ast.parse(source), known):
        where, imported = f"{module}:{line}", unit_of(name)
        if name.startswith(":"):
            if unit_of(name) == ":triton" and importer not in {"kernels", "ops", "__init__"}:
                found.append(f"{where} imports triton; only kernels may, and ops to see whether it is there")
        elif RANK[imported] > RANK[importer] and not (imported == "__init__" and LAYER[importer] == "L5"):
            found.append(f"{where} ({LAYER[importer]}) imports {imported} ({LAYER[imported]}): upwards")
        elif {importer, imported} == {"reference", "kernels"}:
            found.append(f"{where} imports {imported}: an oracle that shares a helper with its kernel is no oracle")
        elif imported == "kernels" and importer not in {
            "kernels",
            "library",
            "activations",
            "gemms",
            "ops",
            "__init__",
        }:
            found.append(f"{where} imports kernels: ops is the only door")
    return found


def first_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A path ``[a, b, ..., a]`` along the edges of ``graph``, or ``[]`` where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for successor in sorted(graph.get(node, ())):
            if cycle := visit(successor, [*path, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


def test_every_module_is_in_the_layer_table():
    unknown = [
        name for name in module_names() if unit_of(name) not in RANK or ("." in name and unit_of(name) not in FOLDERS)
    ]
    assert not unknown, f"give these modules a layer in LAYERS and in the design: {unknown}"


@pytest.mark.parametrize("module", [name for name in module_names() if name != "__init__"])
def test_imports_point_down(module: str):
    modules = module_names()
    if unit_of(module) not in RANK:
        pytest.fail(f"{module} has no layer")
    found = violations(module, modules[module].read_text(encoding="utf-8"), set(modules))
    assert not found, "\n".join(found)


def test_no_import_cycle():
    modules = module_names()
    graph = {
        module: {name for _, name in imports(module, ast.parse(path.read_text(encoding="utf-8")), set(modules))}
        for module, path in modules.items()
        if unit_of(module) != "__init__"
    }
    graph = {module: {name for name in names if name in graph and name != module} for module, names in graph.items()}
    cycle = first_cycle(graph)
    assert not cycle, f"modules that import each other: {' -> '.join(cycle)}"


# The checker itself, on modules that are not there.
KNOWN = {unit for unit in RANK if unit not in FOLDERS} | {"kernels.__init__", "kernels.amax", "integrations.__init__"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops", "from quads_qat import reference\nfrom quads_qat.kernels import amax\nimport triton"),
        ("kernels.amax", "from ..formats import BLOCK\nfrom . import numerics\nimport triton.language as tl"),
        ("load", "from quads_qat.export import Dialect\nimport torch.nn.functional as F"),
        ("cli", "import quads_qat as qq\nfrom quads_qat import __version__, convert"),
        ("__main__", "from quads_qat.cli import main"),
    ],
)
def test_downward_imports_pass(module: str, source: str):
    assert violations(module, source, KNOWN) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("formats", "from quads_qat import ops", "upwards"),
        ("formats", "import quads_qat.ops", "upwards"),
        ("formats", "def f():\n    from .ops import quantize", "upwards"),
        ("linear", "if TYPE_CHECKING:\n    from quads_qat.convert import Coverage", "upwards"),
        ("linear", "import_module('quads_qat.cli')", "upwards"),
        ("linear", "importlib.import_module('.cli', __package__)", "upwards"),
        ("demo", "import quads_qat as qq", "upwards"),
        ("demo", "from quads_qat import *", "upwards"),
        ("demo", "from . import __version__", "upwards"),
        ("ops", "from quads_qat.autograd.inner import f", "upwards"),
        ("reference", "from quads_qat.kernels import amax", "oracle"),
        ("reference", "from quads_qat import kernels", "oracle"),
        ("kernels.amax", "from ..reference import amax", "oracle"),
        ("kernels.amax", "from .. import reference", "oracle"),
        ("linear", "from quads_qat.kernels.amax import amax", "only door"),
        ("packing", "import triton", "triton"),
        ("reference", "def f():\n    from triton import language", "triton"),
    ],
)
def test_wrong_imports_are_named(module: str, source: str, reason: str):
    found = violations(module, source, KNOWN)
    assert len(found) == 1
    assert reason in found[0]


def test_cycles_are_named():
    assert first_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert first_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
