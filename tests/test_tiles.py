"""Contract under test: the tiles that are chosen for a shape can multiply it."""

from hopper_tiles import fits
from hypothesis import given
from hypothesis import strategies as st

from quads_qat.kernels.hopper import K_STEP, Hopper
from quads_qat.kernels.tiles import Wide, configuration, grouped_configuration

ROWS = st.integers(1, 9000)
SHAPES = st.tuples(
    st.integers(1, 1200).map(lambda i: 128 * i) | st.integers(1, 3000), st.integers(1, 900).map(lambda i: 16 * i)
)


@given(ROWS, SHAPES, st.sampled_from([1, 2]))
def test_tiles_for_hopper_fit(m: int, shape: tuple[int, int], terms: int):
    n, k = shape
    for tiles in (
        configuration(m, n, k, terms, 132, False, True),
        grouped_configuration(m, n, k, 64, terms, False, True),
    ):
        if isinstance(tiles, Hopper):
            assert k % K_STEP == 0
            assert fits(tiles, terms)
    assert not isinstance(configuration(m, n, k, terms, 132, True, True), Hopper)
    if k % K_STEP == 0 and 192 < m <= 256 and n * k >= 1 << 25:
        assert isinstance(configuration(m, n, k, terms, 132, False, True), Hopper)


@given(ROWS, SHAPES, st.sampled_from([1, 2]), st.integers(1, 256))
def test_only_linears_are_streamed_and_only_few_rows(m: int, shape: tuple[int, int], terms: int, experts: int):
    of_experts = grouped_configuration(m, *shape, experts, terms, False, True)
    assert not (isinstance(of_experts, Hopper) and of_experts.stream)
    of_linear = configuration(m, *shape, terms, 132, False, True)
    assert not (isinstance(of_linear, Hopper) and of_linear.stream and not 64 < m <= 3072)


@given(st.integers(65, 1024), SHAPES, st.sampled_from([1, 2]))
def test_elsewhere_no_tiles_of_hopper_are_chosen(m: int, shape: tuple[int, int], terms: int):
    assert not isinstance(configuration(m, *shape, terms, 132, False), Hopper)
    assert not isinstance(grouped_configuration(m, *shape, 8, terms, False), Hopper)
    assert isinstance(configuration(m, 8192, 8192, 1, 132, True), Wide)
