"""Sets as FedUL makes them: counts, seeds, and the figures of SPEC 4.4 on MNIST's class counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.errors import ConfigError, DataError, UnknownNameError
from polyfed.maths.surrogate import identifiable
from polyfed.random import stream
from polyfed.tasks.surrogate_sets import (
    Dominated,
    Sets,
    SurrogateSets,
    common_theta,
    draw_sets,
    draw_theta,
    read_proportions,
    surveyed,
    uniform_shares,
)

SEEDS = st.integers(0, 10_000)
MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)  # of its 60,000


def digits(n: int, seed: int = 0) -> Tensor:
    """Labels of n training images of MNIST, as far as their counts go."""
    y = torch.arange(10).repeat_interleave(torch.tensor(MNIST))
    return y[torch.randperm(len(y), generator=stream(seed, "mnist"))[:n]]


def small(n: int = 600, K: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(K, (n,), generator=stream(seed, "labels"))


def histogram(y: Tensor, node: Sets) -> Tensor:
    """Samples of each class in each set, counted one by one."""
    table = torch.zeros_like(node.counts)
    for i, m in zip(node.index.tolist(), node.sets.tolist(), strict=True):
        table[m, y[i]] += 1
    return table


# ---- theta ---------------------------------------------------------------------------------------


@given(M=st.integers(1, 25), K=st.integers(1, 12), seed=SEEDS)
def test_theta_is_drawn_as_the_reference_draws_it(M: int, K: int, seed: int) -> None:
    theta = draw_theta(M, K, stream(seed))
    weights = 0.1 + 0.9 * torch.rand(M, K, generator=stream(seed), dtype=torch.float64)
    for i in range(M):
        row = [float(w) * (10 if k == i % K else 1) for k, w in enumerate(weights[i])]
        assert theta[i].tolist() == pytest.approx([w / sum(row) for w in row], rel=1e-12)


def test_the_common_theta_has_columns_that_sum_to_one() -> None:
    drawn = [draw_theta(20, 10, stream(c)) for c in range(5)]
    theta = common_theta(drawn)
    assert torch.allclose(theta.sum(0), torch.ones(10, dtype=theta.dtype))
    ratio = sum(float(d[3, 1]) for d in drawn) / sum(float(d[7, 1]) for d in drawn)
    assert float(theta[3, 1] / theta[7, 1]) == pytest.approx(ratio, rel=1e-12)


# ---- the sets of a node --------------------------------------------------------------------------


@given(seed=SEEDS, M=st.integers(1, 9), overlap=st.booleans())
def test_a_set_takes_what_theta_asks_for(seed: int, M: int, overlap: bool) -> None:
    y, theta = small(seed=seed), draw_theta(M, 4, stream(seed, "theta"))
    taken, counts = draw_sets(y, theta, stream(seed, "draw"), overlap=overlap)
    there = torch.bincount(y, minlength=4)
    asked = [[int(len(y) // M * float(theta[i, k])) for k in range(4)] for i in range(M)]
    for i, row in enumerate(asked):
        for k, n in enumerate(row):
            total = sum(other[k] for other in asked)
            got, has = int(counts[i, k]), int(there[k])
            if overlap or total <= has:
                assert got == min(n, has)
            else:  # every set gets the same share of what it asked for
                assert got == n * has // total
    pieces = taken.split(counts.sum(1).tolist())
    for piece, row in zip(pieces, counts, strict=True):
        assert torch.equal(torch.bincount(y[piece], minlength=4), row)
        assert len(piece.unique()) == len(piece)  # never twice in one set
    if not overlap:
        assert len(taken.unique()) == len(taken)


def test_overlapping_sets_take_from_a_fresh_shuffle() -> None:
    """Each of n samples is in set i with probability c_i / n, independently: the expected union."""
    y = torch.zeros(2000, dtype=torch.int64)
    theta = torch.full((4, 1), 1.0, dtype=torch.float64)  # 500 of 2000 in each of four sets
    taken, counts = draw_sets(y, theta, stream(0), overlap=True)
    assert counts.flatten().tolist() == [500] * 4
    expected = 2000 * (1 - 0.75**4)
    assert abs(len(taken.unique()) - expected) < 5 * math.sqrt(2000 * 0.3164 * 0.6836)
    first, second = taken[:500], taken[500:1000]
    assert abs(int(torch.isin(first, second).sum()) - 125) < 5 * math.sqrt(125)


# ---- the federation ------------------------------------------------------------------------------


@pytest.mark.parametrize("iid", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("M", [3, 10, 20])
def test_pi_is_recomputed_from_what_was_taken(iid: bool, overlap: bool, M: int) -> None:
    """SPEC 4.7, 9: rows sum to one, and so do the shares of the sets."""
    y = digits(6000)
    nodes = SurrogateSets(sets=M, iid=iid, overlap=overlap).deal(y, seed=1)
    assert len(nodes) == 5
    held = []
    for node in nodes:
        assert torch.equal(node.counts, histogram(y, node))
        expected = node.counts / node.counts.sum(1, keepdim=True).double()
        assert torch.allclose(node.Pi, expected, rtol=1e-12)
        assert torch.allclose(node.Pi.sum(1), torch.ones(M, dtype=torch.float64))
        assert torch.equal(node.sets, node.sets.sort().values)
        assert len(node.index) == len(node.sets) == int(node.counts.sum())
        assert overlap or len(node.index.unique()) == len(node.index)
        held.append(node.index.unique())
    together = torch.cat(held)
    assert len(together.unique()) == len(together)  # no sample is at two nodes


@pytest.mark.parametrize("iid", [True, False])
def test_seeds(iid: bool) -> None:
    y = digits(3000)
    one, same = (SurrogateSets(iid=iid).deal(y, seed=3) for _ in range(2))
    other = SurrogateSets(iid=iid).deal(y, seed=4)
    assert all(torch.equal(a.index, b.index) for a, b in zip(one, same, strict=True))
    assert all(torch.equal(a.Pi, b.Pi) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a.Pi, b.Pi) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0].index, one[1].index)
    assert torch.equal(one[0].Pi, one[1].Pi) == iid


def test_another_seed_draws_other_samples() -> None:
    """One node that holds everything: only the draws of its sets can differ."""
    one, other = (SurrogateSets(nodes=1).deal(digits(3000), seed)[0] for seed in (3, 4))
    both = int(min(one.counts[0, 0], other.counts[0, 0]))
    assert not torch.equal(one.index[:both], other.index[:both])


def test_iid_nodes_want_the_same_sets_and_others_do_not() -> None:
    y = digits(12_000)
    alike, own = (SurrogateSets(iid=i, nodes=3).deal(y, seed=0) for i in (True, False))
    assert torch.equal(alike[0].counts, alike[1].counts)
    assert float((own[0].Pi - own[1].Pi).abs().max()) > 0.3
    common = common_theta([draw_theta(10, 10, stream(0, "sets", "theta", c)) for c in range(3)])
    assert torch.equal(alike[0].counts, (400 * common).long())


def test_figures_of_the_reference_iid() -> None:
    """SPEC 4.4 of 9,600 samples a node: 9,554 drawn, 6,539 distinct; sigma_min .32 to .37.

    That is one replica. The expected number of distinct samples follows from the counts.
    """
    for seed in range(3):
        y = digits(48_000, seed)
        nodes = SurrogateSets().deal(y, seed)
        for node in nodes:
            drawn, distinct = len(node.index), len(node.index.unique())
            assert 9600 - 100 <= drawn <= 9600  # 100 numbers rounded down
            assert abs(drawn - 9554) < 15
            assert abs(distinct - 6539) < 0.06 * 6539
            there = 960 * torch.tensor(MNIST) / 6000  # about: the node's share of each class
            missed = (1 - node.counts / there).clamp_min(0).prod(0)
            assert abs(distinct - float((there * (1 - missed)).sum())) < 200
        assert all(0.27 < sigma < 0.42 for sigma in identifiable([n.Pi for n in nodes]).sigmas)


def test_figures_of_the_reference_non_iid() -> None:
    """SPEC 0, finding 7: tiny or no sigma_min, some rank below 10; all together identifiable."""
    ranks: list[int] = []
    for seed in range(3):
        nodes = SurrogateSets(iid=False).deal(digits(48_000, seed), seed)
        found = identifiable([n.Pi for n in nodes])
        assert all(0 <= sigma < 0.035 for sigma in found.sigmas)
        assert found.dimension == 1
        assert found.margin > 0.1
        ranks += found.ranks
    assert min(ranks) < 10
    assert max(ranks) == 10


# ---- non-IID shares ------------------------------------------------------------------------------


def test_dominated_shares_are_cut_as_written() -> None:
    """Weights about (40, 40, .5 x 8) / 84 of the first node, and so on; 5 x 2 classes."""
    y = digits(48_000)
    shares = Dominated().assign(y, 5, stream(0))
    table = torch.stack([torch.bincount(y[share], minlength=10) for share in shares])
    there = torch.bincount(y)
    assert bool((table.sum(0) <= there).all())
    for c in range(5):
        others = [k for k in range(10) if k // 2 != c]
        assert int(table[c, others].max()) <= 9600 * 0.55 / (0.45 * 160 + 0.45 * 8)
        for k in (2 * c, 2 * c + 1):
            least, most = (
                9600 * a * 80 / (80 * (a + b) + 8 * b) for a, b in ((0.45, 0.55), (0.55, 0.45))
            )
            left = int(there[k] - table[:c, k].sum())
            assert least - 1 <= int(table[c, k]) <= most or int(table[c, k]) == left
    assert int(table[1:, :2].min()) == 0  # a class that is exhausted is missing


def test_dominated_takes_what_the_weights_say() -> None:
    """As the reference counts: a node that finds nothing still moves the place of the next cut."""
    y = small(3000, 6)
    shares = Dominated().assign(y, 3, stream(5))
    generator = stream(5)
    torch.randperm(len(y), generator=generator)  # the shuffle of the samples
    w = 0.45 + 0.1 * torch.rand(3, 6, generator=generator, dtype=torch.float64)
    place = [0] * 6
    for c in range(3):
        for k in (2 * c, 2 * c + 1):
            w[c, k] *= 80
        for k in range(6):
            n, has = int(w[c, k] / w[c].sum() * 1000), int((y == k).sum())
            expected = max(0, min(place[k] + n, has) - place[k])
            assert int((y[shares[c]] == k).sum()) == expected
            place[k] += n


def test_dominated_goes_round_when_nodes_outnumber_pairs() -> None:
    y = small(6000, 4)
    table = [torch.bincount(y[s], minlength=4) for s in Dominated().assign(y, 4, stream(0))]
    assert table[0][:2].min() > 20 * table[0][2:].max()
    assert table[1][2:].min() > 20 * table[1][:2].max()
    assert table[2][:2].sum() > 0.2 * table[2].sum()  # classes 0 and 1 again: what is left of them


# ---- proportions known approximately -------------------------------------------------------------


def test_noise_is_that_of_a_survey() -> None:
    """Standard deviation noise * sqrt(p (1 - p)), mean p; zeros remain."""
    row = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    drawn = surveyed(row.repeat(20_000, 1), 0.2, stream(0))
    assert torch.allclose(drawn.sum(1), torch.ones(20_000, dtype=torch.float64))
    assert torch.allclose(drawn.mean(0), row, atol=0.003)
    assert torch.allclose(drawn.std(0), 0.2 * (row * (1 - row)).sqrt(), rtol=0.03)
    assert not drawn[:, 3].any()


def test_noise_changes_what_is_known_and_nothing_else() -> None:
    y = digits(6000)
    exact, noisy, less = (
        SurrogateSets(noise=s, iid=False).deal(y, seed=0) for s in (0.0, 0.2, 0.01)
    )
    for a, b, c in zip(exact, noisy, less, strict=True):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.counts, b.counts)
        near, far = (float((x.Pi - a.Pi).abs().max()) for x in (c, b))
        assert 0 < near < 0.05 < far
        assert torch.allclose(b.Pi.sum(1), torch.ones(10, dtype=torch.float64))


# ---- test samples --------------------------------------------------------------------------------


def test_uniform_shares_have_equally_many_of_every_class() -> None:
    y = digits(10_000)
    shares = uniform_shares(y, 5, stream(0))
    for share in shares:
        assert torch.bincount(y[share]).tolist() == [200] * 10
        assert len(share.unique()) == 2000
    assert not torch.equal(shares[0].sort().values, shares[1].sort().values)


# ---- what cannot be ------------------------------------------------------------------------------


def test_impossible_sets() -> None:
    with pytest.raises(
        DataError, match=r"node 0: no sample for set .* of 100.*fewer sets, or more"
    ):
        SurrogateSets(nodes=2, sets=100).deal(small(60), seed=0)
    with pytest.raises(DataError, match=r"node 2 of 3 finds all its classes exhausted"):
        Dominated().assign(torch.tensor([0] * 30 + [1] * 3 + [2] * 3), 3, stream(0))
    with pytest.raises(ConfigError, match=r"SurrogateSets\.sets must be >= 1"):
        SurrogateSets(sets=0)
    with pytest.raises(ConfigError, match=r"SurrogateSets\.nodes must be >= 1"):
        SurrogateSets(nodes=0)
    with pytest.raises(ConfigError, match=r"SurrogateSets\.noise must be between"):
        SurrogateSets(noise=1.0)


def test_classes_that_do_not_occur_have_columns_of_zeros() -> None:
    nodes = SurrogateSets(nodes=2, sets=4).deal(small(600, 3), seed=0, classes=5)
    assert all(node.Pi.shape == (4, 5) and not node.Pi[:, 3:].any() for node in nodes)


# ---- a person's own ------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "sets.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_proportions_from_a_file(tmp_path: Path) -> None:
    text = "set,class,proportion\n0,0,0.25\n0,2,0.75\n1,1,1\n"
    expected = torch.tensor([[0.25, 0, 0.75], [0, 1, 0]], dtype=torch.float64)
    assert torch.equal(read_proportions(write(tmp_path, text)), expected)
    shuffled = "proportion, class, note, set\n1,1,x,1\n0.75,2,,0\n0.25,0,,0\n"
    assert torch.equal(read_proportions(write(tmp_path, "\ufeff" + shuffled)), expected)


def test_proportions_with_names_of_classes(tmp_path: Path) -> None:
    text = "set,class,proportion\n0,dog,0.25\n0,cat,0.75\n1,dog,1\n"
    got = read_proportions(write(tmp_path, text), classes=("cat", "dog", "owl"))
    assert got.tolist() == [[0.75, 0.25, 0], [0, 1, 0]]
    path = write(tmp_path, "set,class,proportion\n0,cta,1\n")
    with pytest.raises(UnknownNameError, match=r"sets\.csv, line 2 'cta'. Did you mean 'cat'"):
        read_proportions(path, classes=("cat", "dog"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("set,class,share\n0,0,1\n", r"no column proportion. Its first line must be set,class,pro"),
        ("", r"no column set, class, proportion"),
        ("set,class,proportion\n0,0,a lot\n", r"line 2: proportion must be a number, got 'a lot'"),
        ("set,class,proportion\nA,0,1\n", r"line 2: set must be a number from 0, got 'A'"),
        ("set,class,proportion\n0,-1,1\n", r"line 2: class must be a number from 0, got '-1'"),
        ("set,class,proportion\n0,0\n", r"line 2: proportion must be a number, got ''"),
        ("set,class,proportion\n0,0,.5\n0,0,.5\n", r"line 3: set 0 and class 0 are listed twice"),
        ("set,class,proportion\n0,0,.5\n0,1,.4\n", r"set 0: its proportions sum to 0\.9, expected"),
        ("set,class,proportion\n0,0,1\n2,0,1\n", r"set 1: its proportions sum to 0, expected 1"),
        ("set,class,proportion\n", r"proportions of shape \[0, 0\]"),
    ],
)
def test_files_that_cannot_be_right(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_proportions(write(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        read_proportions(tmp_path / "none.csv")
    (tmp_path / "sets.csv").write_bytes(b"set,class,proportion\n\xff\xfe,0,1\n")
    with pytest.raises(DataError, match=r"sets\.csv cannot be read"):
        read_proportions(tmp_path / "sets.csv")
