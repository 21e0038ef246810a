"""Writes ``data/modelopt_exports.json.gz``: what Model-Optimizer exports of every tiny model (extra ``peers``).

    python tests/make_modelopt_exports.py

Of each quantized weight a digest of its codes and scales is kept, under the name that Model-Optimizer gives it, and of
each model a digest of its own weights, which shows whether another machine builds the same one.
"""

import copy
import gzip
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from modelopt_exports import PATH, digests, model_digest
from tiny_models import ARCHITECTURES, NO_FORWARD, tiny_inputs, tiny_model


def export(arch: str) -> dict:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = tiny_model(arch)
    model.config.architectures = [type(model).__name__]
    found = {"model": model_digest(model)}

    def forward(model: torch.nn.Module) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            model(**tiny_inputs(model))  # pyright: ignore[reportArgumentType]

    mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), None if arch in NO_FORWARD else forward)
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        return found | {"weights": digests(Path(folder))}


def main() -> None:
    exports = {}
    for arch in sorted(ARCHITECTURES):
        read, write = os.pipe()
        if os.fork() == 0:  # a process each: quantization patches classes, and some models fail
            try:
                with os.fdopen(write, "w") as pipe:
                    json.dump(export(arch), pipe)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.wait()
        if text:
            exports[arch] = json.loads(text)
        print(arch, "exported" if text else "FAILED", file=sys.stderr)
    with gzip.GzipFile(PATH, "w", mtime=0) as file:
        file.write(json.dumps(exports, indent=0, sort_keys=True).encode())


if __name__ == "__main__":
    main()
