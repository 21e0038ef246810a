import os
from importlib.util import find_spec

import torch

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []

if not collect_ignore_glob:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read when vllm is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_PLUGINS"] = ""  # the plugin is put in by the tests that are about it
    if torch.version.cuda is None:  # torchvision's binary is for CUDA; its Python code wants these names all the same
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
