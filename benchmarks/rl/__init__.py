"""RL on a small mixture of experts: what a trainer and its rollout in NVFP4 do to each other over a few hundred steps.

``questions`` are the task, ``arms`` say who trains and samples in what, ``grpo`` is the loop, ``run`` starts many loops
side by side, ``table`` and ``figures`` show what they logged.
"""
