"""What ``check_first_step`` reports: one check a line, and the limits of the log-prob gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quads_qat.gap import GapStats


@dataclass(frozen=True, kw_only=True)
class GapLimits:
    """What a healthy first step stays below; see :class:`~quads_qat.gap.GapStats`.

    The defaults lie between a W4A16 trainer with compensated rollouts (mean 0.02, k3 0.001 on the bundled model) and
    the same trainer with naive W4A4 rollouts (0.08, 0.014). The largest gap grows with the number of tokens, so it has
    no default; the paper's healthy runs stay below 0.9 in a step.
    """

    mean: float = 0.05
    k3: float = 0.005
    share_over_ln2: float = 0.01
    max: float = float("inf")

    def exceeded(self, gap: GapStats) -> list[str]:
        """Like ``mean 0.2 > 0.05``, for each statistic over its limit."""
        found = {name: (getattr(gap, name), getattr(self, name)) for name in ("mean", "k3", "share_over_ln2", "max")}
        return [f"{name} {value:.4g} > {limit:g}" for name, (value, limit) in found.items() if value > limit]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: contract, coverage, weights, rollout log-probs, trainer log-probs or gap.
        passed: None where what it needs was not given.
        found: what was seen.
        way_out: what to do about it; "" where it passed.
    """

    name: str
    passed: bool | None
    found: str
    way_out: str = ""

    def __str__(self) -> str:
        state = {True: "pass", False: "FAIL", None: "skip"}[self.passed]
        line = f"{state}  {self.name}: {self.found}"
        return f"{line}\n      -> {self.way_out}" if self.way_out else line


@dataclass(frozen=True)
class FirstStepReport:
    """What :func:`check_first_step` found; ``print`` it."""

    checks: tuple[Check, ...]
    gap: GapStats | None = None

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return any(check.passed for check in self.checks) and not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.passed is False]

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))

    def to_dict(self) -> dict[str, Any]:
        """For JSON and loggers."""
        checks = [vars(check) for check in self.checks]
        return {"ok": self.ok, "checks": checks, "gap": None if self.gap is None else self.gap.to_dict()}

    def raise_if_failed(self) -> FirstStepReport:
        """Return the report, or raise ValueError: in its first line what failed and the ways out, then the report.

        A report that checked nothing raises too, and says what to pass.
        """
        failed = [f"{c.name}: {c.found} -> {c.way_out}" for c in self.checks if c.passed is False]
        if failed:
            raise ValueError(f"check_first_step: {', '.join(self.failed)} failed. {'; '.join(failed)}\n{self}")
        if not self.ok:
            raise ValueError(
                "check_first_step: nothing was checked: pass rollout= (or, of an engine, received= and contract=) "
                f"and input_ids= with logp_rollout= and logp_trainer=\n{self}"
            )
        return self
