"""Arithmetic questions such as ``"\\n37+45="`` as tensors: prompts of one length, answers that are right or wrong.

The bundled model knows some of them: drawn at temperature 1 it gets 57 % of the sums, 16 % of the differences and 66 %
of the products of two numbers of two digits right. One token is one byte.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

END = ord("\n")
NEW_TOKENS = 6
"""Of an answer: at most four digits, or a sign and two, and the newline; one is left over."""
HELD_OUT = 512
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Questions:
    """Questions and their answers.

    Attributes:
        prompts: [Q, 7] ids.
        answers: [Q, NEW_TOKENS] ids, the newline included.
        counts: [Q, NEW_TOKENS] bool, where an answer has a token.
    """

    prompts: Tensor
    answers: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Tensor | slice) -> Questions:
        return Questions(self.prompts[index], self.answers[index], self.counts[index])

    def repeat(self, samples: int) -> Questions:
        """Each question ``samples`` times, one after the other."""
        return Questions(*(t.repeat_interleave(samples, 0) for t in (self.prompts, self.answers, self.counts)))

    def reward(self, sampled: Tensor) -> Tensor:
        """1 where the sampled ids [Q, NEW_TOKENS] begin with the answer and its newline, else 0: float32 [Q]."""
        return ((sampled == self.answers) | ~self.counts).all(-1).float()


def all_questions(device: torch.device | str = "cpu") -> tuple[Questions, Questions]:
    """(to train on, held out): the same split in every run; HELD_OUT of the 24,300 questions are never trained on."""
    numbers = range(10, 100)
    asked = [(a, op, b) for op in OPERATIONS for a in numbers for b in numbers]
    random.Random(0).shuffle(asked)
    prompts = torch.tensor([list(f"\n{a}{op}{b}=".encode()) for a, op, b in asked], device=device)
    answers = [f"{OPERATIONS[op](a, b)}\n".encode() for a, op, b in asked]
    padded = torch.tensor([list(answer.ljust(NEW_TOKENS, b"\0")) for answer in answers], device=device)
    questions = Questions(prompts, padded, padded != 0)
    return questions[HELD_OUT:], questions[:HELD_OUT]


def counted(sampled: Tensor) -> Tensor:
    """Where a sampled token [B, T] is part of the answer: up to the first newline, which is included."""
    is_end = (sampled == END).long()
    return (is_end.cumsum(-1) - is_end) == 0
