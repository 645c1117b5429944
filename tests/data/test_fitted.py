"""The largest size that fits, against a scan of all sizes, and in how many measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoomkv.data.fitted import FittedPrompt, largest


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=300),
    st.integers(0, 5),
    st.integers(0, 3000),
)
def test_equals_a_scan_where_tokens_grow(steps, least, limit):
    sums = [sum(steps[: at + 1]) for at in range(len(steps))]
    least = min(least, len(sums) - 1)
    fitting = [size for size in range(least, len(sums)) if sums[size] <= limit]
    if not fitting:
        with pytest.raises(ValueError, match=f"thing length={limit}: .* takes {sums[least]} tok"):
            largest(sums.__getitem__, limit, least, len(sums) - 1, "thing")
    else:
        assert largest(sums.__getitem__, limit, least, len(sums) - 1, "thing") == fitting[-1]


@given(st.lists(st.integers(0, 500), min_size=20, max_size=100), st.integers(0, 500))
def test_always_fits_and_the_next_does_not_even_where_tokens_fall(sizes, limit):
    sizes[0] = 0
    found = largest(sizes.__getitem__, limit, 0, len(sizes) - 1, "thing")
    assert sizes[found] <= limit
    assert found == len(sizes) - 1 or sizes[found + 1] > limit


@pytest.mark.parametrize("limit", [100, 4096, 131_072])
@pytest.mark.parametrize("slope", [1, 7, 22])
def test_few_measurements(limit, slope):
    measured = []

    def tokens(size: int) -> int:
        measured.append(size)
        return 60 + slope * size + size % 3

    found = largest(tokens, limit, 0, limit, "thing")
    assert tokens(found) <= limit < tokens(found + 1)
    assert len(measured) <= 12


def test_a_prompt_is_its_two_parts():
    one = FittedPrompt("a b", "c?", "It is", ("d",), 3, "x-1")
    assert one.prompt == "a b\nc?"
    assert one.to_dict()["answers"] == ("d",)
