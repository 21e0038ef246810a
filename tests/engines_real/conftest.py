import os
from importlib.util import find_spec

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read when vllm is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_PLUGINS"] = ""  # the plugin is put in by the tests that are about it

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []
