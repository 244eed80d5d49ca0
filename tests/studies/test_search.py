from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyfed.engines.local import Work
from polyfed.engines.progress import Progress
from polyfed.errors import ModelError
from polyfed.studies import search as step
from polyfed.studies.outcome import tried
from polyfed.studies.space import Range

optuna = pytest.importorskip("optuna")

SPACE = {"x": Range(0.0, 1.0)}
Curve = Callable[[float, int], list[float]]


class Fake:
    """A run whose accuracies are known beforehand."""

    def __init__(self, curve: list[float], listener: Progress, ran: list[int]) -> None:
        self.curve, self.listener, self.ran = curve, listener, ran

    def steps(self) -> Iterator[Any]:
        self.listener.begin("", len(self.curve) - 1)
        for tick, value in enumerate(self.curve):
            yield Work(tick, [])
            self.ran.append(tick)
            self.listener.round_done(tick, {"a": value - 0.1, "b": value + 0.1})
        yield Work(len(self.curve), [])
        return {"a": self.curve[-1]}


step.quiet()


def make_study(pruner: Any = None, storage: Any = None) -> Any:
    study = optuna.create_study(
        direction="maximize", pruner=pruner or optuna.pruners.NopPruner(), storage=storage
    )
    study.set_user_attr("seed", 0)
    study.set_user_attr("runs", 2)
    return study


def go(study: Any, curve: Curve, trials: int, **more: Any) -> list[int]:
    ran: list[int] = []

    def begin(params: dict[str, Any], seed: int, listener: Progress) -> Any:
        return Fake(curve(params["x"], seed), listener, ran).steps()

    step.search(study, SPACE, begin, trials=trials, seeds=[3, 4], **more)
    return ran


def test_a_trial_is_worth_its_worst_run() -> None:
    study = make_study()
    go(study, lambda x, seed: [0.2, x if seed == 3 else x / 2], 3)
    for trial in study.trials:
        assert trial.value == trial.params["x"] / 2
        assert trial.user_attrs["by_run"] == [trial.params["x"], trial.params["x"] / 2]


def test_rounds_report_the_worst_run() -> None:
    study = make_study()
    go(study, lambda x, seed: [0.5 if seed == 3 else 0.4, 0.6 if seed == 3 else 0.8, 0.9], 1)
    assert study.trials[0].intermediate_values == pytest.approx({0: 0.4, 1: 0.6})


class Third(optuna.pruners.BasePruner):  # type: ignore[name-defined, misc]
    """Ends every trial at its second round."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.last_step >= 2)


def test_a_pruned_trial_ends_at_once() -> None:
    study = make_study(Third())
    ran = go(study, lambda x, seed: [0.1] * 6, 1)
    assert study.trials[0].state.name == "PRUNED"
    assert sorted(ran) == [0, 0, 1, 1, 2, 2]
    found = tried(study.trials[0])
    assert (found.state, found.value, found.by_run) == ("pruned", pytest.approx(0.1), [])


def test_a_pruned_run_asks_for_nothing_more() -> None:
    trial = step._Trial(make_study().ask(), runs=1)

    def steps() -> Iterator[Any]:
        yield []
        trial.is_pruned = True
        yield []

    run = step._run(steps(), trial)  # type: ignore[arg-type]
    next(run)
    with pytest.raises(StopIteration) as end:
        run.send([])
    assert end.value.value is None


def test_the_last_round_is_never_pruned() -> None:
    study = make_study(Third())
    go(study, lambda x, seed: [0.1, 0.1, 0.7], 1)
    assert study.trials[0].state.name == "COMPLETE"
    assert study.trials[0].value == 0.7


def test_the_median_prunes() -> None:
    """Six trials rise; one that stays low ends after its first round."""
    study = make_study(step.pruner())
    order = iter(range(7))
    level: dict[float, int] = {}

    def curve(x: float, seed: int) -> list[float]:
        if x not in level:
            level[x] = next(order)
        return [0.5, 0.1, 0.1, 0.1] if level[x] == 6 else [0.5, 0.6, 0.7, 0.8]

    go(study, curve, 7)
    assert [t.state.name for t in study.trials] == ["COMPLETE"] * 6 + ["PRUNED"]
    assert max(study.trials[-1].intermediate_values) == 1


def test_what_cannot_be_built_fails_and_the_search_goes_on() -> None:
    study = make_study()
    began: list[float] = []

    def begin(params: dict[str, Any], seed: int, listener: Progress) -> Any:
        began.append(params["x"])
        if len(began) == 1:
            raise ModelError("too small")
        return Fake([0.5, 0.6], listener, []).steps()

    step.search(study, SPACE, begin, trials=2, seeds=[0, 1])
    assert [t.state.name for t in study.trials] == ["FAIL", "COMPLETE"]
    assert tried(study.trials[0]).why == "too small"
    assert tried(study.trials[0]).state == "failed"


def rises(x: float, seed: int) -> list[float]:
    return [0.1, 1 - (x - 0.3) ** 2 - 0.01 * seed]


def params(study: Any) -> list[float]:
    return [t.params["x"] for t in step.ended(study)]


@pytest.mark.parametrize("together", [1, 3])
def test_interrupted_goes_on_as_if_it_had_not_been(together: int) -> None:
    whole = make_study()
    go(whole, rises, 12, together=together)
    study = make_study()
    go(study, rises, 6, together=together)

    class Stop(Exception):  # noqa: N818
        pass

    def stops(x: float, seed: int) -> list[float]:
        raise Stop

    with pytest.raises(Stop):
        go(study, stops, 12, together=together)
    go(study, rises, 12, together=together)
    assert params(study) == params(whole)
    assert len(study.trials) == 12 + together
    assert len(set(params(whole))) == 12  # and no setting is tried twice


def test_the_search_finds_what_is_better() -> None:
    study = make_study()
    go(study, rises, 30)
    assert abs(study.best_params["x"] - 0.3) < 0.05


def test_late_asks_nothing_more() -> None:
    study = make_study()
    late = iter([False, False, True])
    go(study, rises, 10, is_late=lambda: next(late))
    assert len(study.trials) == 2


def test_the_last_batch_is_not_too_large() -> None:
    study = make_study()
    heard: list[int] = []
    go(study, rises, 5, together=3, told=lambda t: heard.append(t.user_attrs["place"]))
    assert heard == [0, 1, 2, 3, 4]


def test_trials_asked_together_run_in_step() -> None:
    study = make_study()
    ran = go(study, lambda x, seed: [0.1, 0.2, 0.3], 2, together=2)
    assert ran == [0] * 4 + [1] * 4 + [2] * 4
