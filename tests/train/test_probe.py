"""Probes of features: against scikit-learn, loops over single samples, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.data import Split
from polyfed.core.phase import Optimiser, Phase
from polyfed.errors import ConfigError, DataError
from polyfed.random import stream
from polyfed.train import probe
from polyfed.train.probe import few_labels_probe, knn_probe, labelled_share, linear_probe


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed, "draw", *shape))


def clusters(m: int, *, classes: int = 4, n: int = 8, spread: float = 1.0, seed: int = 0) -> Split:
    """Samples around one random centre a class; the centres do not depend on the seed."""
    y = torch.randint(classes, (m,), generator=stream(seed, "labels", m))
    return Split(2 * draw(classes, n, seed=99)[y] + spread * draw(m, n, seed=seed + 1), y)


# --- neighbours -----------------------------------------------------------------------------------


def literal_knn(train: Split, test: Split, k: int, tau: float) -> float:
    """One test sample after the other."""
    right, pair = 0, _pair(train)
    for x, y in zip(test.x, test.y, strict=True):
        near = sorted(
            ((float(x @ z / (x.norm() * z.norm())), int(c)) for z, c in zip(*pair, strict=True)),
            reverse=True,
        )
        votes: dict[int, float] = {}
        for cosine, c in near[:k]:
            votes[c] = votes.get(c, 0.0) + math.exp(cosine / tau)
        right += max(votes, key=lambda c: votes[c]) == int(y)
    return right / len(test)


def _pair(split: Split) -> tuple[Tensor, Tensor]:
    assert split.y is not None
    return split.x, split.y


@pytest.mark.parametrize("k", [1, 3, 20, 200])
@pytest.mark.parametrize("tau", [0.07, 0.1, 1.0])
def test_neighbours_vote_as_written(k: int, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = clusters(70, spread=3.0), clusters(50, spread=3.0, seed=5)
    expected = literal_knn(train, test, k, tau)
    assert knn_probe(train, test, k=k, temperature=tau) == pytest.approx(expected)
    monkeypatch.setattr(probe, "_CHUNK", 7)
    assert knn_probe(train, test, k=k, temperature=tau) == pytest.approx(expected)


def test_the_settings_of_the_vote_matter_and_have_the_usual_defaults() -> None:
    train, test = clusters(300, spread=4.0), clusters(400, spread=4.0, seed=5)
    usual = knn_probe(train, test)
    assert usual == knn_probe(train, test, k=200, temperature=0.1)
    assert usual != knn_probe(train, test, k=1)
    assert usual != knn_probe(train, test, temperature=10.0)


def test_a_near_neighbour_outvotes_two_far_ones() -> None:
    """cos 1 against twice cos 0.5: e^(1/tau) > 2 e^(0.5/tau) while tau < 0.72."""
    half = math.sqrt(0.75)
    train = Split(torch.tensor([[1.0, 0.0], [0.5, half], [0.5, -half]]), torch.tensor([0, 1, 1]))
    test = Split(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
    assert knn_probe(train, test, temperature=0.7) == 1.0
    assert knn_probe(train, test, temperature=0.75) == 0.0
    assert knn_probe(train, test, k=1, temperature=0.75) == 1.0


def test_length_does_not_matter_to_neighbours_and_nothing_overflows() -> None:
    train, test = clusters(60), clusters(40, seed=5)
    scaled = Split(train.x * torch.rand(60, 1, generator=stream(0, "s")).add(0.1), train.y)
    plain = knn_probe(train, test, temperature=1e-3)
    assert knn_probe(scaled, test, temperature=1e-3) == plain
    assert plain > 0.8  # exp(1 / 1e-3) would be infinite, and every vote the same


# --- linear ---------------------------------------------------------------------------------------


def test_linear_probe_finds_what_scikit_learn_finds() -> None:
    from sklearn.linear_model import LogisticRegression

    train, test = clusters(400, spread=2.0), clusters(400, spread=2.0, seed=5)
    other = LogisticRegression(C=1e4, max_iter=1000).fit(train.x.numpy(), train.y.numpy())
    expected = other.score(test.x.numpy(), test.y.numpy())
    assert 0.6 < expected < 0.98
    assert linear_probe(train, test) == pytest.approx(expected, abs=0.02)


def test_linear_probe_is_named_by_its_seed() -> None:
    train, test = clusters(90, spread=3.0), clusters(2000, spread=3.0, seed=5)
    scores = []
    for seed in (0, 0, 1, 2):
        probe._found.clear()
        scores.append(linear_probe(train, test, seed=seed, epochs=3, batch=8, lr=0.1))
    assert scores[0] == scores[1]
    assert len(set(scores)) > 1


def test_linear_probe_starts_from_zero_and_learns_in_epochs() -> None:
    """Untrained, all scores are equal and the first class is chosen."""
    train, test = clusters(200), clusters(300, seed=5)
    _, y = _pair(test)
    untrained = linear_probe(train, test, epochs=0)
    assert untrained == pytest.approx(float((y == 0).double().mean()))
    assert linear_probe(train, test) > 0.9


def test_features_and_generators_are_left_alone() -> None:
    train, test = clusters(50), clusters(50, seed=5)
    before, state = train.x.clone(), torch.random.get_rng_state()
    for score in (linear_probe, knn_probe):
        score(train, test)
    few_labels_probe(train, test, 0.1, standardise=True)
    assert torch.equal(train.x, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_standardising_makes_up_for_scale_and_offset() -> None:
    """x -> c x + d of any feature changes nothing; a dead feature is no harm."""
    train, test = clusters(300, spread=2.0), clusters(300, spread=2.0, seed=5)
    scale, offset = torch.logspace(-3, 1, 8), 10 * draw(8, seed=3)

    def moved(split: Split) -> Split:
        dead = torch.full((len(split), 1), 0.25)
        return Split(torch.cat([split.x * scale + offset, dead], 1), split.y)

    expected = linear_probe(train, test, standardise=True)
    got = linear_probe(moved(train), moved(test), standardise=True)
    assert got == pytest.approx(expected, abs=0.01)
    assert linear_probe(moved(train), moved(test)) < expected - 0.1
    few = few_labels_probe(train, test, 0.1, standardise=True)
    assert few_labels_probe(moved(train), moved(test), 0.1, standardise=True) == pytest.approx(
        few, abs=0.01
    )


def test_standardised_features_have_mean_zero_and_deviation_one() -> None:
    train, test = probe._standardised(clusters(50), clusters(20, seed=5))
    torch.testing.assert_close(train.x.mean(0), torch.zeros(8), rtol=0, atol=1e-6)
    torch.testing.assert_close(train.x.std(0, correction=0), torch.ones(8))
    assert test.x.mean(0).abs().max() > 0.01  # by the training samples' numbers, not its own


def test_the_linear_probe_is_the_usual_one_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SPEC 6: Adam 3e-3, 200 epochs."""
    asked: list[tuple[int | None, float, Optimiser]] = []

    def trained(train: Split, test: Split, classes: int, phase: Phase, seed: int) -> float:
        asked.append((phase.epochs, phase.batch, phase.optimiser))
        return 0.0

    monkeypatch.setattr(probe, "_trained", trained)
    monkeypatch.setattr(probe, "_found", {})
    train, test = clusters(20), clusters(20, seed=5)
    linear_probe(train, test)
    linear_probe(train, test, epochs=3, lr=0.5, batch=7)
    assert asked == [
        (200, 512, Optimiser(name="adam", lr=3e-3)),
        (3, 7, Optimiser(name="adam", lr=0.5)),
    ]


# --- few labels -----------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    share=st.sampled_from([0.01, 0.1, 0.25, 1.0]),
    seed=st.integers(0, 50),
)
def test_a_share_of_every_class(counts: list[int], share: float, seed: int) -> None:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=stream(seed, "order"))]
    chosen = labelled_share(y, share, stream(seed, "share"))
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    for c, n in enumerate(counts):
        wanted = max(1, round(share * n)) if n else 0
        assert int((y[chosen] == c).sum()) == wanted


def test_the_choice_is_random_and_named() -> None:
    y = torch.arange(1000) % 10
    a, again, b = (labelled_share(y, 0.1, stream(s, "share")) for s in (0, 0, 1))
    assert torch.equal(a, again)
    assert len(a) == 100
    assert len(set(a.tolist()) & set(b.tolist())) < 30  # 10 are expected
    assert 300 < float(a.double().mean()) < 700  # from everywhere, not the first


def test_few_labels_probe_is_a_linear_probe_on_its_share() -> None:
    train, test = clusters(500, spread=3.0), clusters(500, spread=3.0, seed=5)
    x, y = _pair(train)
    chosen = labelled_share(y, 0.02, stream(3, "probe", "labels"))
    expected = linear_probe(Split(x[chosen], y[chosen]), test, seed=3)
    assert few_labels_probe(train, test, 0.02, seed=3) == expected
    assert few_labels_probe(train, test, 1.0) == linear_probe(train, test)
    assert expected < linear_probe(train, test)


def test_the_seed_of_a_few_labels_probe_names_its_batches_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few samples there is one batch, whose order does not show."""
    monkeypatch.setattr(probe, "linear_probe", lambda train, test, *, seed=0: seed)
    assert few_labels_probe(clusters(20), clusters(20), 0.5, seed=3) == 3


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_shares_out_of_range_are_errors(share: float) -> None:
    with pytest.raises(ConfigError, match="share must be above 0 and at most 1"):
        few_labels_probe(clusters(20), clusters(20), share)


@pytest.mark.parametrize("score", [linear_probe, knn_probe])
def test_what_cannot_be_probed_is_an_error(score) -> None:
    good = clusters(20)
    with pytest.raises(DataError, match="a probe needs labels"):
        score(Split(good.x), good)
    with pytest.raises(DataError, match="a probe needs labels"):
        score(good, Split(good.x))
    with pytest.raises(DataError, match=r"one vector per sample, got \[20, 2, 4\]"):
        score(Split(good.x.view(20, 2, 4), good.y), good)
    with pytest.raises(DataError, match="training features have 8 numbers, test features 5"):
        score(good, Split(good.x[:, :5], good.y))


def test_classes_that_only_the_test_has_are_counted_as_wrong() -> None:
    train, test = clusters(50, classes=3), clusters(50, seed=5)
    _, y = _pair(test)
    for score in (linear_probe, knn_probe):
        assert score(train, test) <= float((y < 3).double().mean())


# ---- what was asked before -----------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The outcomes of probes that were trained: each another number."""
    outcomes: list[float] = []

    def train(*given: object) -> float:
        outcomes.append(float(len(outcomes)))
        return outcomes[-1]

    monkeypatch.setattr(probe, "_trained", train)
    monkeypatch.setattr(probe, "_found", {})
    return outcomes


def test_equal_features_are_probed_once(trained: list[float]) -> None:
    train, test = clusters(20), clusters(20, seed=5)
    x, y = _pair(train)
    copy = Split(x.clone(), y.clone())
    assert linear_probe(train, test) == linear_probe(copy, test) == 0
    others = [
        linear_probe(test, train),
        linear_probe(Split(x + 1e-6, y), test),
        linear_probe(Split(x, y.flip(0)), test),
        linear_probe(train, Split(test.x, _pair(test)[1].flip(0))),
        linear_probe(Split(x.double(), y), Split(test.x.double(), test.y)),
        linear_probe(train, test, seed=1),
        linear_probe(train, test, epochs=1),
        linear_probe(train, test, lr=1.0),
        linear_probe(train, test, batch=3),
        linear_probe(train, test, standardise=True),
    ]
    assert others == trained[1:] == list(range(1, 11))


def test_only_the_last_probes_are_remembered(
    trained: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_MOST", 2)
    train, test = clusters(20), clusters(20, seed=5)
    asked = [linear_probe(train, test, seed=seed) for seed in (0, 1, 1, 2, 1, 0)]
    assert asked == [0, 1, 1, 2, 1, 3]
    assert len(probe._found) == 2
