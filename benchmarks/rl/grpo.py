"""GRPO, one update for each batch: sample from the rollout, score, train the trainer, sync. No framework.

The importance ratio is between the trainer and the policy that sampled, with the log-probabilities that the rollout
itself reported: pi_old is pi_rollout. Numbers of a step are those of the batch before its update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import quads_qat as qq
from benchmarks.rl.arms import Arm, Pair
from benchmarks.rl.questions import NEW_TOKENS, Questions, all_questions, counted
from quads_qat.demo import DATA


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a run; the same for all arms that are compared.

    Attributes:
        model: directory of the model; a byte is a token.
        steps: optimizer steps.
        prompts: of a step.
        samples: of each prompt; advantages are normalized among them.
        lr: of AdamW on float32 masters, constant.
        clip: the importance ratio counts between 1 - clip and 1 + clip.
        grad_clip: the largest norm of a gradient.
        every: steps between two evaluations on held-out questions, and between two calibrations.
        device: ``cpu`` or ``cuda``.
        split: the rollout on the GPU after the trainer's.
        graphs: sample through a CUDA graph, on a GPU.
        masters: sync BF16 weights, quantized on arrival, which waits for the GPU less often; else packed ones.
    """

    model: str = str(DATA)
    steps: int = 150
    prompts: int = 64
    samples: int = 8
    lr: float = 1e-4
    clip: float = 0.2
    grad_clip: float = 1.0
    every: int = 10
    device: str = "cpu"
    split: bool = False
    graphs: bool = True
    masters: bool = False


# ------------------------------------------------------------------------------------------------------------- sampling


class Sampler:
    """Answers of a model, sampled at temperature 1 or greedy, over a KV cache; prompts [B, P], B and P fixed.

    With ``graph`` all tokens are one CUDA graph, captured at the second call: a rollout's buffers keep their addresses
    when its weights are synced, so it stays valid.
    """

    def __init__(self, model: nn.Module, graph: bool = False) -> None:
        self.model, self.wanted = model, graph
        self.graph: torch.cuda.CUDAGraph | None = None
        self.prompts = self.noise = self.out = torch.empty(0)
        self.calls = 0

    @torch.no_grad()
    def __call__(self, prompts: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Sampled ids [B, NEW_TOKENS] and their log-probabilities at temperature 1, float32 [B, NEW_TOKENS]."""
        noise = torch.full((), 0.0 if greedy else 1.0, device=prompts.device)
        self.calls += 1
        if not self.wanted or self.calls == 1:
            return self._generate(prompts, noise)
        if self.graph is None:
            self._capture(prompts, noise)
        assert self.graph is not None
        self.prompts.copy_(prompts)
        self.noise.copy_(noise)
        self.graph.replay()
        ids, logp = self.out
        return ids.clone(), logp.clone()

    def _capture(self, prompts: Tensor, noise: Tensor) -> None:
        self.prompts, self.noise = prompts.clone(), noise.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._generate(self.prompts, self.noise)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._generate(self.prompts, self.noise)

    def _generate(self, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        cache, last, ids, chosen = None, prompts, [], []
        for _ in range(NEW_TOKENS):
            out = self.model(last, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            # the largest logit plus Gumbel noise is a sample; without the noise it is the greedy choice
            gumbel = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
            last = (logits + noise * gumbel).argmax(-1, keepdim=True)
            ids.append(last)
            chosen.append(logits.log_softmax(-1).gather(-1, last))
        return torch.cat(ids, 1), torch.cat(chosen, 1)


# ------------------------------------------------------------------------------------------------------------- training


class Optimizer:
    """AdamW on float32 masters of a model's BF16 parameters: updates far below a BF16 step add up."""

    def __init__(self, model: nn.Module, lr: float, grad_clip: float) -> None:
        self.live = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.live]
        on_gpu = self.live[0].is_cuda
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
        self.grad_clip = grad_clip

    def step(self) -> Tensor:
        """Update the masters and the model; the norm of the gradient before it was clipped."""
        for master, live in zip(self.masters, self.live, strict=True):
            master.grad = None if live.grad is None else live.grad.float()
            live.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.grad_clip)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.masters)  # pyright: ignore
        return norm


def advantages(reward: Tensor, samples: int) -> Tensor:
    """Of rewards [B], normalized in each group of ``samples``; 0 where all of a group are equal."""
    groups = reward.view(-1, samples)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


@dataclass
class Batch:
    """What a step sampled: prompts [B, P]; ids, log-probabilities of the rollout and mask [B, T]; reward [B]."""

    prompts: Tensor
    ids: Tensor
    old: Tensor
    mask: Tensor
    reward: Tensor


def policy_loss(trainer: nn.Module, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, the trainer's log-probabilities [B, T], further numbers): the clipped objective, a mean over tokens."""
    sequences = torch.cat([batch.prompts, batch.ids], 1)
    logits = trainer(sequences, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1].float()
    distribution = logits.log_softmax(-1)
    logp = distribution.gather(-1, batch.ids.unsqueeze(-1)).squeeze(-1)
    ratio = (logp - batch.old).exp()
    advantage = advantages(batch.reward, settings.samples).unsqueeze(-1)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    tokens = batch.mask.sum()
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
        numbers = {
            "entropy": (entropy * batch.mask).sum() / tokens,
            "clipped": ((gain != ratio * advantage) & batch.mask).sum() / tokens,
        }
    return -(gain * batch.mask).sum() / tokens, logp.detach(), numbers


class Loop:
    """One arm with one seed; iterate over it for the record of each step."""

    def __init__(self, arm: Arm, settings: Settings, seed: int) -> None:
        torch.manual_seed(seed)
        self.arm, self.settings, self.device = arm, settings, torch.device(settings.device)
        self.rollout_device = self.device
        if settings.split:
            first = torch.cuda.current_device()
            self.device = torch.device("cuda", first)
            self.rollout_device = torch.device("cuda", (first + 1) % torch.cuda.device_count())
        self.pair = Pair.of(arm, settings.model, self.device, settings.masters, self.rollout_device)
        self.optimizer = Optimizer(self.pair.trainer, settings.lr * arm.rate, settings.grad_clip)
        self.training, self.held_out = all_questions(self.device)
        graph = settings.graphs and self.device.type == "cuda"
        self.sampler, self.asked = Sampler(self.pair.rollout, graph), Sampler(self.pair.trainer)
        self.generator = torch.Generator().manual_seed(seed)
        self.clock = _Clock(self.device)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.pair.sync()
        self.pair.calibrate(self.held_out.prompts[: self.settings.prompts].to(self.rollout_device))
        for step in range(self.settings.steps):
            yield {"step": step} | self.step(step % self.settings.every == 0)
        yield {"step": self.settings.steps, "differing": self.pair.differing()} | self.evaluate()

    def step(self, evaluate: bool) -> dict[str, Any]:
        """Sample, train, sync: what was seen before the update."""
        accuracy = self.evaluate() if evaluate else {}
        self.clock.start()
        batch = self.sample()
        sampling = self.clock.lap()
        loss, logp, numbers = policy_loss(self.pair.trainer, batch, self.settings)
        loss.backward()
        gap = qq.gap_stats(batch.old, logp, batch.mask)
        found: dict[str, Any] = {"reward": batch.reward.mean().item()}
        found |= {f"gap_{name}": value for name, value in gap.to_dict().items()}
        norm = self.optimizer.step()
        self.pair.stepped()
        found |= {"grad_norm": norm.item()} | {name: value.item() for name, value in numbers.items()}
        found |= {"sample_s": sampling, "train_s": self.clock.lap()}
        self.pair.sync()
        if evaluate:
            self.pair.calibrate(torch.cat([batch.prompts, batch.ids], 1).to(self.rollout_device))
        return found | {"sync_s": self.clock.lap()} | accuracy

    def sample(self) -> Batch:
        """A batch of the rollout."""
        chosen = torch.randint(len(self.training), (self.settings.prompts,), generator=self.generator)
        questions = self.training[chosen.to(self.device)].repeat(self.settings.samples)
        ids, old = self._ask(self.sampler, questions.prompts, self.rollout_device)
        return Batch(questions.prompts, ids, old, counted(ids), questions.reward(ids))

    def evaluate(self) -> dict[str, float]:
        """Share of held-out questions answered right, greedily, by both models."""
        questions = _first(self.held_out, self.settings.prompts * self.settings.samples)
        samplers = {
            "rollout_accuracy": (self.sampler, self.rollout_device),
            "trainer_accuracy": (self.asked, self.device),
        }
        return {
            name: questions.reward(self._ask(asked[0], questions.prompts, asked[1], greedy=True)[0]).mean().item()
            for name, asked in samplers.items()
        }

    def _ask(
        self, sampler: Sampler, prompts: Tensor, device: torch.device, greedy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Answers of a model on ``device`` and their log-probabilities, here."""
        with torch.cuda.device(device) if self.settings.split else nullcontext():  # where a graph is captured
            ids, logp = sampler(prompts.to(device), greedy)
        return ids.to(self.device), logp.to(self.device)


def _first(questions: Questions, rows: int) -> Questions:
    """``rows`` of them, so that a captured graph fits; from the start again if there are fewer."""
    index = torch.arange(rows, device=questions.prompts.device) % len(questions)
    return questions[index]


class _Clock:
    """Seconds between calls, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, 0.0

    def start(self) -> None:
        self.last = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
