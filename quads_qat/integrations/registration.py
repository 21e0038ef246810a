"""Registers the quantization name ``modelopt`` with transformers, when transformers' quantizers are imported.

Importing them takes longer than all of quads_qat and torch's checks together, and not everyone who imports quads_qat
loads a model. So unless they are there already, a finder waits at the front of ``sys.meta_path`` for that one module,
leaves when it sees it, and registers when it has run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Make ``from_pretrained`` load ModelOpt NVFP4 checkpoints, now or when transformers is imported. Idempotent.

    A name that is taken, by transformers or by another package, stays as it is.
    """
    if _MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets one module run, then registers."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # of this spec's own loader
        return spec


def _register() -> None:
    try:
        import quads_qat.integrations.modelopt  # noqa: F401  # registers as it is imported, now or already under way
    except Exception as error:  # never in the way of importing transformers
        warnings.warn(
            f"quads_qat: this transformers takes no quantizer for 'modelopt' ({type(error).__name__}: {error}); load "
            "ModelOpt checkpoints with quads_qat.load_model or quads_qat.load_rollout",
            stacklevel=2,
        )
