from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from polyfed.errors import MessageError
from polyfed.maths.masks import add, fits, from_fixed, masked, new_secret, public_of, to_fixed
from polyfed.random import stream


def company(n: int) -> tuple[list[bytes], list[bytes]]:
    secrets = [new_secret() for _ in range(n)]
    return secrets, [public_of(secret) for secret in secrets]


@pytest.mark.parametrize("n", [2, 3, 7])
def test_masks_cancel_exactly_also_beyond_the_ring(n: int) -> None:
    secrets, keys = company(n)
    xs = [torch.randint(-(2**62), 2**62, (40,), generator=stream(0, i)) for i in range(n)]
    hidden = [masked(x, s, keys, b"t") for x, s in zip(xs, secrets, strict=True)]
    wanted = [sum(int(x[k]) for x in xs) % 2**64 for k in range(40)]
    assert [int(v) % 2**64 for v in add(hidden)] == wanted
    for x, y in zip(xs, hidden, strict=True):
        assert int((x == y).sum()) == 0


def test_a_sum_that_lacks_one_or_is_about_something_else_says_nothing() -> None:
    secrets, keys = company(3)
    zero = torch.zeros(1000, dtype=torch.int64)
    hidden = [masked(zero, s, keys, b"t") for s in secrets]
    assert bool((add(hidden) == 0).all())
    for partial in (hidden[:2], hidden[1:], hidden[:1]):
        assert _is_uniform(add(partial))
    other = masked(zero, secrets[2], keys, b"another topic")
    assert _is_uniform(add([*hidden[:2], other]))


def _is_uniform(words: torch.Tensor) -> bool:
    """Chi-square over bytes, at one in a million."""
    counts = Counter(words.numpy().tobytes())
    total = 8 * len(words)
    statistic = sum((counts[b] - total / 256) ** 2 for b in range(256)) / (total / 256)
    return bool(statistic < chi2.ppf(1 - 1e-6, 255))


def test_one_masked_message_is_indistinguishable_from_uniform_whatever_is_in_it() -> None:
    secrets, keys = company(3)
    for value in (0, 1, 2**40):
        x = torch.full((20_000,), value)
        assert not _is_uniform(x)
        assert _is_uniform(masked(x, secrets[0], keys, b"t"))


def test_every_other_node_alone_hides_a_message() -> None:
    """Who colludes with all but one other still sees nothing: each pair's mask is uniform."""
    secrets, keys = company(3)
    x = torch.zeros(20_000, dtype=torch.int64)
    mine = masked(x, secrets[0], keys, b"t")
    known = masked(x, secrets[0], [keys[0], keys[1]], b"t")  # what the first other could take off
    assert _is_uniform(mine - known)


def test_new_keys_new_masks() -> None:
    x = torch.zeros(10, dtype=torch.int64)
    seen = {tuple(masked(x, s[0], k, b"t").tolist()) for s, k in (company(3) for _ in range(5))}
    assert len(seen) == 5


def test_a_key_of_no_order_is_refused() -> None:
    with pytest.raises(MessageError, match="public key that is none"):
        masked(torch.zeros(2, dtype=torch.int64), new_secret(), [bytes(32)], b"t")


def test_the_mean_is_the_plain_one_to_the_last_bit_of_fixed_point() -> None:
    values = [torch.randn(100, generator=stream(0, i), dtype=torch.float64) * 10 for i in range(3)]
    weights = [25, 18, 33]
    total = add([to_fixed(v, w) for v, w in zip(values, weights, strict=True)])
    got = from_fixed(total, sum(weights), torch.float64)
    literal = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert float((got - literal).abs().max()) <= 3 * 0.5 * 2**-32 / sum(weights) + 1e-14
    counters = add([to_fixed(torch.tensor(c), w) for c, w in ((9, 25), (6, 18), (9, 33))])
    assert from_fixed(counters, 76, torch.int64).item() == 8  # 8.29


def test_what_does_not_fit_is_said_so() -> None:
    assert fits(torch.tensor([1e3, -1e3]), 1000, 100)
    assert not fits(torch.tensor([1e9]), 1000, 100)
    assert not fits(torch.tensor([-1e9]), 1000, 100)
    assert not fits(torch.tensor([math.nan]), 1, 3)
    assert not fits(torch.tensor([math.inf]), 1, 3)
    assert fits(torch.zeros(0), 1, 3)
    edge = 2.0**30 / (8 * 4)
    assert fits(torch.tensor([edge * 0.999], dtype=torch.float64), 8, 4)
    assert not fits(torch.tensor([edge], dtype=torch.float64), 8, 4)
    assert abs(int(to_fixed(torch.tensor(edge * 0.999), 8))) * 4 < 2**62
