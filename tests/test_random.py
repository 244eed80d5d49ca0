import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.random import ambient, seed_of, stream

PATHS = st.lists(st.integers() | st.text(max_size=5), max_size=4)


def test_seeds_are_these_for_ever() -> None:
    """Every published number depends on them."""
    assert seed_of(0, "init") == 5184189234732532942
    assert seed_of(1, "node", "M0", "batches", 3) == 6462728942274622975
    assert torch.randperm(6, generator=stream(0, "batches")).tolist() == [2, 5, 3, 4, 1, 0]


@given(st.integers(), PATHS, st.integers(), PATHS)
def test_another_path_is_another_stream(a: int, path: list, b: int, other: list) -> None:
    same = (a, path) == (b, other) and list(map(type, path)) == list(map(type, other))
    assert (seed_of(a, *path) == seed_of(b, *other)) is same
    assert 0 <= seed_of(a, *path) < 2**63


def test_names_do_not_run_together() -> None:
    assert len({seed_of(0, "a", "b"), seed_of(0, "ab"), seed_of(0, "a,b"), seed_of(0, 1, "b"),
                seed_of(0, "1", "b")}) == 5  # fmt: skip


def test_a_draw_elsewhere_shifts_nothing() -> None:
    first, second = stream(0, "a"), stream(0, "b")
    torch.rand(100, generator=first)
    assert torch.equal(torch.rand(3, generator=second), torch.rand(3, generator=stream(0, "b")))


def test_ambient_points_torch_at_a_stream_and_puts_it_back() -> None:
    before = torch.random.get_rng_state()
    with ambient(0, "init"):
        inside = torch.rand(3)
        with ambient(0, "init"):
            nested = torch.rand(3)
        after = torch.rand(3)
    with ambient(0, "init"):
        assert torch.equal(torch.rand(6), torch.cat([inside, after]))
    assert torch.equal(inside, nested)
    assert torch.equal(torch.random.get_rng_state(), before)
    try:
        with ambient(0, "init"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert torch.equal(torch.random.get_rng_state(), before)


def test_another_process_draws_the_same() -> None:
    code = "from polyfed.random import seed_of; print(seed_of(5, 'node', 'é', 2))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(printed.stdout) == seed_of(5, "node", "é", 2)
