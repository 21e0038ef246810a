"""``gap_stats``: values by hand, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quads_qat as qq


def test_values_by_hand():
    trainer = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    rollout = torch.tensor([[-1.0, -1.0], [-3.5, -1.0]])
    stats = qq.gap_stats(rollout, trainer, mask=torch.tensor([[1, 1], [1, 0]]))
    assert stats.tokens == 3
    assert stats.max == 1.0
    assert stats.mean == 0.5
    assert stats.k1 == pytest.approx(1 / 6, rel=1e-15)
    assert stats.k3 == pytest.approx((math.exp(-1) - 1 + 1 + math.exp(0.5) - 1 - 0.5) / 3, rel=1e-14)
    assert stats.share_over_ln2 == pytest.approx(1 / 3)
    assert set(stats.to_dict()) == {"tokens", "max", "mean", "k1", "k3", "share_over_ln2"}


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(-2, 2))
def test_k3_is_never_negative_and_zero_without_a_gap(logp: list[float], shift: float):
    trainer = torch.tensor(logp, dtype=torch.float64)
    assert qq.gap_stats(trainer, trainer).k3 == 0.0
    assert qq.gap_stats(trainer + shift, trainer).k3 >= 0.0


def test_masked_infinities_do_not_count():
    stats = qq.gap_stats(torch.tensor([-1.0, -torch.inf]), torch.tensor([-1.5, 0.0]), torch.tensor([True, False]))
    assert stats.max == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2), torch.zeros(3)), "must have one shape"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(3)), "must have one shape"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "no tokens are counted; check the mask"),
        ((torch.tensor([torch.nan]), torch.zeros(1)), "NaN or inf; mask padding out"),
    ],
)
def test_refusals_say_the_way_out(arguments, message: str):
    with pytest.raises(ValueError, match=message):
        qq.gap_stats(*arguments)


@pytest.mark.parametrize("place", range(3))
def test_lists_of_numbers_are_no_log_probs(place: int):
    arguments: list = [torch.zeros(2)] * 3
    arguments[place] = [0.0, 0.0]
    name = ("logp_rollout", "logp_trainer", "mask")[place]
    with pytest.raises(TypeError, match=f"gap_stats: {name} must be a torch.Tensor, got list"):
        qq.gap_stats(*arguments)


def test_the_logger_writes_every_nth_step():
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

    writer = Writer()
    log = qq.GapLogger(writer, every=3, prefix="gap")
    rollout, trainer = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    returned = [log(step, rollout, trainer, torch.tensor([1, 0])) for step in range(5)]
    assert [stats is not None for stats in returned] == [True, False, False, True, False]
    assert {step for _, _, step in writer.scalars} == {0, 3}
    assert ("gap/max", 0.5, 3) in writer.scalars
    assert {tag for tag, _, _ in writer.scalars} == {f"gap/{name}" for name in returned[0].to_dict()}
    with pytest.raises(TypeError, match=r"writer must have add_scalar\(tag, value, step\), got list"):
        qq.GapLogger([])
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        qq.GapLogger(writer, every=0)
