"""The page "When does which method win?" and its pictures, from the summary of the contests alone.

Within a contest, seeds are pairs: the method with the highest mean is put beside each other one by
the exact one-sided signed-rank test, with Holm's correction (`paired`); the picture ranks methods
over seeds. Over the contests of a group, methods that are in all of them are ranked (`ranks`).
The control (all data in one place) is shown and not ranked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.engines.table import size
from polyfed.experiments.verdict import ALPHA, order
from polyfed.record.files import write_text
from polyfed.studies import ranks
from polyfed.studies.contest import CONTROL
from polyfed.studies.contests import CONTESTS
from polyfed.studies.contests_of_files import OF_FILES
from polyfed.studies.outcome import figure
from polyfed.studies.paired import holm
from polyfed.studies.ranks import Ranks, rank
from polyfed.studies.wins import SUMMARY, read

PAGE, PICTURES = "which_wins.md", "which_wins"
ALONE = ("local", "byol", "hub-only")  # the control of each group: nothing is shared


@dataclass(frozen=True)
class Standing:
    """What a contest came to.

    Attributes:
        best: the method with the highest mean.
        p: for each other method, the corrected p that the best is above it by chance.
        means: mean test accuracy of every method, the best first; with the control.
        ranked: mean ranks over seeds, without the control.
    """

    best: str
    p: Mapping[str, float]
    means: Mapping[str, float]
    ranked: Ranks

    @property
    def level(self) -> list[str]:
        """Those that the best is not told apart from."""
        return [name for name, p in self.p.items() if p > ALPHA]

    @property
    def below(self) -> list[str]:
        """Those that it is."""
        return [name for name, p in self.p.items() if p <= ALPHA]


def standing(contest: Mapping[str, Any]) -> Standing:
    """Who is ahead in a contest, and of whom for certain."""
    by_method = {name: entry["accuracy"] for name, entry in contest["methods"].items()}
    means = {name: statistics.fmean(values) for name, values in by_method.items()}
    means = dict(sorted(means.items(), key=lambda item: -item[1]))
    best, *others = (name for name in means if name != CONTROL)
    ps = holm([order(by_method[best], by_method[name], ">").p for name in others])
    seeds = range(len(by_method[best]))
    scores = {f"seed {i}": {n: by_method[n][i] for n in (best, *others)} for i in seeds}
    return Standing(best, dict(zip(others, ps, strict=True)), means, rank(scores))


def over_contests(summary: Mapping[str, Any]) -> dict[str, Ranks]:
    """For each group of enough contests, the ranks of the methods that are in all of them.

    Groups that are the same up to a comma are also one.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for contest in summary["contests"]:
        wide = contest["group"].partition(",")[0]
        for group in dict.fromkeys((wide, contest["group"])):
            groups.setdefault(group, []).append(contest)
    found = {}
    for group, members in groups.items():
        common = set.intersection(*(set(c["methods"]) for c in members)) - {CONTROL}
        if len(members) > 1 and len(common) > 1:
            means = {c["name"]: standing(c).means for c in members}
            ranked = rank(
                {name: {m: each[m] for m in sorted(common)} for name, each in means.items()}
            )
            if ranked.critical <= len(common) - 1:  # else nothing could be told apart
                found[group] = ranked
    return found


# ---- the page ------------------------------------------------------------------------------------


def page(summary: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = ["# When does which method win?", _intro(summary)]
    standings = {c["name"]: standing(c) for c in summary["contests"]}
    parts += ["## In short", _short(summary, standings)]
    for group, ranked in over_contests(summary).items():
        parts += [f"## Over all contests with {group}", *_over(group, ranked)]
    for contest in summary["contests"]:
        parts += _contest(contest, standings[contest["name"]])
    parts += ["## How it was done", _how(summary)]
    return "\n\n".join(parts) + "\n"


def _intro(summary: Mapping[str, Any]) -> str:
    seeds = len(summary["seeds"])
    held = [contest["name"] for contest in summary["contests"]]
    waiting = [contest.name for contest in CONTESTS if contest.name not in held]
    left = f"\n\nNot held yet: {_names(waiting)}." if waiting else ""
    return (
        f"{len(summary['contests'])} situations, small enough for a CPU, and in each the methods "
        f"that fit it. Every method had the same budget: {summary['trials']} settings tried on "
        f"validation data of one federation, then {seeds} tests of the best of them on the same "
        f"{seeds} federations, of other seeds. This page is made from `{SUMMARY}` beside it: "
        "`polyfed experiments --out docs/results --pages`.\n\n"
        "**Told apart** means: by an exact one-sided signed-rank test over the seeds against the "
        f"best, with Holm's correction, alpha {ALPHA:g}. What is not told apart may still differ. "
        "These are small networks, few data and short trainings: who wins here by a little may "
        f"lose elsewhere. Read it for the large differences.{left}"
    )


def _short(summary: Mapping[str, Any], standings: Mapping[str, Standing]) -> str:
    heads = ["situation", "highest mean", "not told apart from it", "sharing"]
    rows = [
        [
            f"[{contest['name']}](#{contest['name']}). {contest['asks']}",
            f"**`{s.best}`** {s.means[s.best]:.3f}",
            _names(s.level),
            _gain(s),
        ]
        for contest, s in ((c, standings[c["name"]]) for c in summary["contests"])
    ]
    return _table(heads, rows)


def _gain(s: Standing) -> str:
    """What the best gains over the method that shares nothing."""
    alone = next((name for name in ALONE if name in s.means), None)
    if alone is None:
        return ""
    if alone == s.best:
        return f"no gain: `{alone}` has the highest mean"
    gain = f"{s.means[s.best] - s.means[alone]:+.3f} over `{alone}`"
    return gain if alone in s.below else f"undecided: {gain}"


def _over(group: str, ranked: Ranks) -> list[str]:
    apart = [
        f"{_names([n])} ranks before {_names(worse)}"
        for n in ranked.mean
        if (worse := [m for m in ranked.mean if ranked.mean[m] - ranked.mean[n] >= ranked.critical])
    ]
    said = "; ".join(apart) if ranked.p <= ALPHA and apart else "nothing is told apart"
    return [
        f"Ranked over {_names(ranked.tasks)}. The {len(ranked.mean)} methods that are in all "
        f"{len(ranked.tasks)} of them, by mean rank (1 is best): "
        f"{', '.join(f'`{name}` {mean:.1f}' for name, mean in ranked.mean.items())}.",
        f"Friedman's test: p = {ranked.p:.2g}; critical difference {ranked.critical:.2f} ranks: "
        f"{said}.",
        f"![Mean ranks over contests with {group}]({PICTURES}/{_file(group)})",
    ]


def _contest(contest: Mapping[str, Any], s: Standing) -> list[str]:
    heads = [
        "method",
        f"test {contest['judged_by']}",
        "mean rank",
        "p against the best",
        "sent per node",
        "best settings",
    ]
    rows = []
    for name in s.means:
        entry = contest["methods"][name]
        values = entry["accuracy"]
        p = "" if name not in s.p else f"{s.p[name]:.2g}" + (" *" if s.p[name] <= ALPHA else "")
        rows.append(
            [
                f"`{name}`" + (" (control)" if name == CONTROL else ""),
                f"{s.means[name]:.3f} ± {statistics.stdev(values):.3f}",
                f"{s.ranked.mean[name]:.1f}" if name in s.ranked.mean else "",
                p,
                size(statistics.fmean(entry["bytes_sent_per_node"])),
                ", ".join(f"{n} {figure(v)}" for n, v in entry["best"].items()),
            ]
        )
    return [
        f"## {contest['name']}",
        contest["asks"],
        _verdict(s),
        f"![Mean ranks over seeds, {contest['name']}]({PICTURES}/{_file(contest['name'])})",
        _table(heads, rows),
        f"Not there: {_absent(contest['not_there'])}.",
    ]


def _verdict(s: Standing) -> str:
    """In words."""
    first = f"**`{s.best}`** has the highest mean"
    if not s.level:
        return f"**`{s.best}` wins**: it is told apart from all others."
    if not s.below:
        return f"**Undecided**: {first}, and nothing is told apart from it."
    return f"{first}, and is told apart from {_names(s.below)}; **undecided**: {_names(s.level)}."


def _absent(why: Mapping[str, str]) -> str:
    """Methods by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in why.items():
        reasons.setdefault(reason, []).append(name)
    return "; ".join(f"{_names(names)} ({reason})" for reason, names in reasons.items())


def _how(summary: Mapping[str, Any]) -> str:
    entries = [entry for c in summary["contests"] for entry in c["methods"].values()]
    seconds = sum(
        e["cpu_seconds_tuning"] + e["cpu_seconds_a_run"] * len(summary["seeds"]) for e in entries
    )
    dates = sorted({c["date"] for c in summary["contests"]})
    commits = " and ".join(dict.fromkeys(e["commit"] for e in entries))
    later = [c.name for c in OF_FILES]
    lines = [
        f"`{summary['command']}`; {seconds / 60:.0f} minutes of one busy core",
        f"commit {commits}; {'; '.join(dict.fromkeys(map(_versions, summary['contests'])))}",
        f"searches: seed {summary['tuned_with']}; tests: seeds {summary['seeds'][0]} to "
        f"{summary['seeds'][-1]}; {' and '.join(dates)}",
        "searched: each method's own space (`polyfed.studies.spaces`: learning rate, epochs, and "
        "what its paper sets) without rounds, batch and network, which are alike for all in a "
        "contest; one training a setting; the first is the recipe",
        "where a task deals the same pool of samples out anew with every seed, one that a search "
        "was judged by may be a test sample of another seed, for all methods alike; the test "
        "images of permuted digits and of MNIST in sets are never seen by a search",
        "not blind: the contests' rounds, batches and ranges were set, alike for all methods,"
        " after short runs without any search on the test seeds 0 to 3; those of "
        f"{_names(later)} on the seeds 2000 and 2001, which are not tested",
        "sent per node: in the whole run, by the ledger",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _versions(contest: Mapping[str, Any]) -> str:
    environment = contest["environment"]
    versions = [f"{name} {environment[name]}" for name in ("polyfed", "torch", "python", "numpy")]
    return f"{', '.join(versions)}; {environment['platform']}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _file(name: str) -> str:
    return f"{name.replace(',', '').replace(' ', '-')}.svg"


# ---- files ---------------------------------------------------------------------------------------


def pictures(summary: Mapping[str, Any]) -> dict[str, Ranks]:
    """The ranks that each picture shows, by its file's name."""
    by_seed = {_file(c["name"]): standing(c).ranked for c in summary["contests"]}
    return {**by_seed, **{_file(g): r for g, r in over_contests(summary).items()}}


def write(out: Path, *, draw: bool = True) -> Path:
    """Write the page, and its pictures, from the summary in a folder."""
    summary = read(out / SUMMARY)
    write_text(out / PAGE, page(summary))
    if draw:
        folder, wanted = out / PICTURES, pictures(summary)
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.svg"):
            if path.name not in wanted:
                path.unlink()
        for name, ranked in wanted.items():
            ranks.draw(ranked, folder / name)
    return out / PAGE
