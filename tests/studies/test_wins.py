"""Contests: the same budget for all, nothing run twice, and a page that says what was found."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed import methods
from polyfed.engines.run import plain
from polyfed.errors import ConfigError, RunError
from polyfed.studies import wins, wins_page
from polyfed.studies.contest import CONTROL, Contest
from polyfed.studies.contests import CONTESTS
from polyfed.studies.spaces import space_of
from polyfed.studies.wins import SUMMARY, TUNED_WITH, hold, misfits, read

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TINY = Contest(
    name="tiny",
    group="labels",
    asks="Two nodes.",
    task="digits-permuted",
    task_options={"num_nodes": 2, "train": 20, "test": 20, "permuted": 1, "head": "linear"},
    methods=("local", "fedper"),
    options={"rounds": 1, "batch": 0.5},
    base={"lr": 1e-2, "local_epochs": 2},
    hold_out=0.5,
    left_out={m: "not asked" for m in methods.METHODS if m not in ("fedul", "fedmd")},
)


def entry(values: Sequence[float], sent: float = 0.0) -> dict[str, Any]:
    return {
        "commit": "abc1234",
        "space": {"lr": "0.001:0.1:log"},
        "best": {"lr": 0.01},
        "validation": 0.5,
        "accuracy": list(values),
        "bytes_sent_per_node": [sent] * len(values),
        "cpu_seconds_tuning": 60.0,
        "cpu_seconds_a_run": 6.0,
    }


def made(**contests: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A summary of contests whose accuracies are given."""
    return {
        "format": wins.FORMAT,
        "command": "polyfed contests",
        "trials": 8,
        "tuned_with": TUNED_WITH,
        "seeds": list(range(10)),
        "contests": [
            {
                "name": name,
                "group": "labels",
                "asks": "A situation.",
                "judged_by": "accuracy",
                "date": "2026-11-15",
                "environment": dict.fromkeys(
                    ("polyfed", "torch", "python", "numpy", "platform"), "1"
                ),
                "methods": {method: entry(values) for method, values in by_method.items()},
                "not_there": {"mocha": "linear", "fedavg": "outputs differ", "ccvr": "linear"},
            }
            for name, by_method in contests.items()
        ],
    }


HIGH = [0.9 + 0.001 * i for i in range(10)]
NEAR = [value - 0.01 * (-1) ** i for i, value in enumerate(HIGH)]
LOW = [value - 0.2 for value in HIGH]


# ---- running -------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every method that is tuned and tested, with its budget."""
    seen: list[tuple[Any, ...]] = []

    def noted(
        contest: Contest, method: str, folder: Path, data: Path | None, trials: int, seeds: Any
    ) -> dict[str, Any]:
        seen.append((contest.name, method, trials, list(seeds)))
        return entry([0.5] * len(seeds))

    monkeypatch.setattr(wins, "one", noted)
    return seen


def test_all_methods_have_the_same_budget(tmp_path: Path, calls: list[Any]) -> None:
    summary = hold(tmp_path, trials=3, seeds=2, contests=[TINY])
    assert calls == [("tiny", "local", 3, [0, 1]), ("tiny", "fedper", 3, [0, 1])]
    assert (summary["trials"], summary["seeds"]) == (3, [0, 1])
    assert TUNED_WITH not in summary["seeds"]
    assert json.loads((tmp_path / SUMMARY).read_text()) == summary


def test_what_is_finished_is_not_run_again(tmp_path: Path, calls: list[Any]) -> None:
    hold(tmp_path, trials=3, seeds=2, contests=[TINY])
    next((tmp_path / "tiny").glob("fedper-*.json")).unlink()
    (tmp_path / SUMMARY).unlink()
    hold(tmp_path, trials=3, seeds=2, contests=[TINY])
    assert [method for _, method, *_ in calls] == ["local", "fedper", "fedper"]
    (tmp_path / SUMMARY).unlink()
    hold(tmp_path, trials=4, seeds=2, contests=[TINY])  # another budget is another matter
    assert len(calls) == 5


def test_a_summary_is_enough_to_go_on(tmp_path: Path, calls: list[Any]) -> None:
    """Methods whose settings are the same are not run again; other contests stay."""
    other = replace(TINY, name="other")
    hold(tmp_path, trials=3, seeds=2, contests=[TINY, other])
    before = json.loads((tmp_path / SUMMARY).read_text())
    before["contests"][0] |= {"date": "2026-01-01", "group": "what it once was"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SUMMARY).write_text(json.dumps(before))
    calls.clear()
    again = hold(elsewhere, trials=3, seeds=2, contests=[TINY])
    assert calls == []
    assert again["contests"][0] == before["contests"][0] | {"group": "labels"}
    assert again["contests"][1] == before["contests"][1]
    changed = replace(TINY, own={"fedper": {"rounds": 2}})
    third = replace(TINY, name="third")
    again = hold(elsewhere, trials=3, seeds=2, contests=[third, changed])
    assert calls == [(*c, 3, [0, 1]) for c in (
        ("third", "local"), ("third", "fedper"), ("tiny", "fedper"),
    )]  # fmt: skip
    assert [c["name"] for c in again["contests"]] == ["tiny", "other", "third"]
    assert again["contests"][0]["date"] != "2026-01-01"


def test_contests_of_another_budget_do_not_join(tmp_path: Path, calls: list[Any]) -> None:
    hold(tmp_path, trials=3, seeds=2, contests=[TINY])
    with pytest.raises(RunError, match=r"has trials 3, but 4 are wanted.* Choose another folder"):
        hold(tmp_path, trials=4, seeds=2, contests=[TINY])
    with pytest.raises(RunError, match=r"has seeds \[0, 1\], but \[0\] are wanted"):
        hold(tmp_path, trials=3, seeds=1, contests=[TINY])


def test_contests_without_their_data_are_left_out(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    said: list[str] = []
    needs = next(c for c in CONTESTS if c.task == "mnist")
    hold(tmp_path, trials=1, seeds=1, contests=[needs, TINY], shown=said.append)
    assert [c["name"] for c in json.loads((tmp_path / SUMMARY).read_text())["contests"]] == ["tiny"]
    assert any(line.startswith(f"{needs.name}: left out. task mnist reads") for line in said)


def test_tuned_then_tested(tmp_path: Path) -> None:
    found = wins.one(TINY, "fedper", tmp_path / "s", None, 2, [0, 1])
    assert found["space"] == {"lr": "0.001:0.1:log", "local_epochs": "1:4"}  # around its base
    assert set(found["best"]) == set(found["space"])
    study = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert study["study"]["seed"] == TUNED_WITH
    assert study["study"]["runs"] == 1
    assert sum(len(step["trials"]) for step in study["steps"]) == 2
    assert found["best"] == study["best"]
    assert len(found["accuracy"]) == 2
    assert found["accuracy"][0] != found["accuracy"][1]
    assert min(found["bytes_sent_per_node"]) > 0


def test_every_method_is_there_or_has_its_reason() -> None:
    missing = misfits(TINY)
    assert set(missing) | set(TINY.methods) == set(methods.METHODS)
    assert missing["fedul"] == "node M0 knows no sets"
    assert missing["fedmd"] == "node M0 has no split 'public'"
    assert missing["ccvr"] == "not asked"
    with pytest.raises(ConfigError, match="tiny: joint could take part"):
        misfits(replace(TINY, left_out={}))


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda c: c.name)
def test_contests_are_fair(contest: Contest) -> None:
    """Rounds and batches are alike, and everybody has something to search."""
    rounds = set()
    for name in contest.methods:
        settled = contest.settled(name)
        rounds.add(settled["rounds"])
        task = contest.federation(name)
        base = contest.begun(name)
        space = space_of(name, task, {**base, **settled})
        assert set(space) - {"rounds", "batch", "representation"} - set(settled), name
        assert methods.make(name, {**base, **settled}, task).rounds == settled["rounds"]
    assert len(rounds) == 1
    assert len(set(contest.methods)) == len(contest.methods)


def test_what_is_kept_goes_on_as_todays_contests() -> None:
    """Else what a setting was called by has changed, and the next command would run it anew."""
    summary, by_name = read(RESULTS / SUMMARY), {c.name: c for c in CONTESTS}
    for held in summary["contests"]:
        for method, entry in held["methods"].items():
            key = wins._key(by_name[held["name"]], method, summary["trials"], len(summary["seeds"]))
            assert entry["key"] == key, (held["name"], method)


def test_what_a_contest_is_judged_by_is_what_its_task_gives() -> None:
    judges = {c.name: (c.judged_by, getattr(c.federation("local"), "measure", "accuracy"))
              for c in CONTESTS}  # fmt: skip
    assert judges.pop("mine-fields") == ("area under the ROC curve", "auc")
    assert set(judges.values()) == {("accuracy", "accuracy")}


def test_mocha_has_linear_models_and_the_others_networks() -> None:
    """It trains no trunk: without one, the inputs are its features."""
    there = [c for c in CONTESTS if "mocha" in c.methods]
    assert [c.name for c in there] == ["hospitals", "mine-fields"]
    for contest in there:
        widths = {m: plain(contest.federation(m))["hidden"] for m in contest.methods}
        assert {m for m, width in widths.items() if width == 0} == {"mocha"}
        assert "`mocha` has linear models" in contest.asks


# ---- the page ------------------------------------------------------------------------------------


def test_a_clear_winner() -> None:
    summary = made(one={"fedavg": HIGH, "local": LOW, CONTROL: [1.0] * 10})
    standing = wins_page.standing(summary["contests"][0])
    assert (standing.best, standing.below, standing.level) == ("fedavg", ["local"], [])
    assert CONTROL not in standing.ranked.mean
    text = wins_page.page(summary)
    assert "**`fedavg` wins**: it is told apart from all others." in text
    assert "+0.200 over `local` |" in text
    assert "| `joint` (control) | 1.000 ± 0.000 |  |  |" in text
    assert "- commit abc1234; polyfed 1, torch 1, python 1, numpy 1; 1\n" in text
    assert "6 minutes of one busy core" in text
    assert "Not there: `mocha`, `ccvr` (linear); `fedavg` (outputs differ)." in text


def test_dates_versions_and_what_judged() -> None:
    summary = made(one={"fedavg": HIGH, "local": LOW}, two={"fedavg": HIGH, "local": LOW})
    two = summary["contests"][1]
    two |= {"date": "2026-11-19", "judged_by": "area under the ROC curve"}
    two["environment"] = two["environment"] | {"torch": "2"}
    text = wins_page.page(summary)
    assert "; 2026-11-15 and 2026-11-19\n" in text
    assert "; polyfed 1, torch 1, python 1, numpy 1; 1; polyfed 1, torch 2, python 1" in text
    assert text.count("| test accuracy |") == text.count("| test area under the ROC curve |") == 1


def test_what_is_not_told_apart_is_undecided() -> None:
    summary = made(one={"fedavg": HIGH, "fedper": NEAR, "local": LOW})
    text = wins_page.page(summary)
    assert "is told apart from `local`; **undecided**: `fedper`." in text
    text = wins_page.page(made(one={"fedavg": HIGH, "local": NEAR}))
    assert "**Undecided**: **`fedavg`** has the highest mean, and nothing is told apart" in text
    assert "| undecided: +0.000 over `local` |" in text
    assert "no gain: `local`" in wins_page.page(made(one={"fedavg": LOW, "local": HIGH}))


def test_ties_are_ranked_over_the_contests_of_a_group() -> None:
    names = ("fedavg", "fedper", "local")
    values = (HIGH, NEAR, LOW, [1.0] * 10)
    contests = {f"c{i}": dict(zip((*names, CONTROL), values, strict=True)) for i in range(12)}
    contests["c0"] |= {"cwt": HIGH}  # not in all of them
    (ranked,) = wins_page.over_contests(made(**contests)).values()
    assert list(ranked.mean) == list(names)
    assert len(ranked.tasks) == 12
    text = wins_page.page(made(**contests))
    assert "## Over all contests with labels" in text
    assert "Ranked over `c0`, `c1`, " in text
    assert "are in all 12 of them, by mean rank (1 is best): `fed" in text
    assert ", `local` 3.0.\n" in text
    assert "`fedavg` ranks before" in text
    assert wins_page.over_contests(made(one=contests["c1"])) == {}
    summary = made(**contests)
    for contest in summary["contests"][:4]:
        contest["group"] = "labels, some mean others"
    found = wins_page.over_contests(summary)
    assert {group: len(ranked.tasks) for group, ranked in found.items()} == {
        "labels": 12, "labels, some mean others": 4,
    }  # fmt: skip
    assert "labels-some-mean-others.svg" in wins_page.pictures(summary)


def test_the_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / SUMMARY).write_text(json.dumps(made(one={"fedavg": HIGH, "local": LOW})))
    assert wins_page.write(tmp_path).read_text().count(".svg") == 1
    assert "fedavg 1.00" in (tmp_path / "which_wins" / "one.svg").read_text()
    (tmp_path / SUMMARY).write_text(json.dumps(made(other={"fedavg": HIGH, "local": LOW})))
    assert "Not held yet: `classes-overlap`, " in wins_page.write(tmp_path).read_text()
    assert [path.name for path in (tmp_path / "which_wins").iterdir()] == ["other.svg"]
    for text in ("{}", "not json"):
        (tmp_path / SUMMARY).write_text(text)
        with pytest.raises(RunError, match="is not a summary of contests"):
            read(tmp_path / SUMMARY)
    (tmp_path / SUMMARY).write_text('{"format": 0}')
    with pytest.raises(RunError, match="has format 0"):
        read(tmp_path / SUMMARY)
    with pytest.raises(RunError, match="could not read"):
        read(tmp_path / "nothing.json")


def test_the_page_in_the_repository_is_what_its_summary_makes() -> None:
    summary = read(RESULTS / SUMMARY)
    again = "run: polyfed experiments --out docs/results --pages"
    assert (RESULTS / wins_page.PAGE).read_text(encoding="utf-8") == wins_page.page(summary), again
    drawn = {path.name for path in (RESULTS / wins_page.PICTURES).glob("*.svg")}
    assert drawn == set(wins_page.pictures(summary)), again
