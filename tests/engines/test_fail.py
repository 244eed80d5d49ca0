"""Faults on purpose, from the command line to the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from polyfed import cli
from polyfed.engines.progress import Progress
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.testing import tiny

SCRIPT = "cut 0-1 @3; kill M2 @5; heal @8"
RECORDED = [
    {"tick": 3, "node": "M0-M1", "fault": "cut"},
    {"tick": 5, "node": "M2", "fault": "killed"},
    {"tick": 8, "node": "M2", "fault": "healed"},
    {"tick": 8, "node": "M0-M1", "fault": "healed"},
]
LI = pf.LI(rounds=9, batch=40, lr=1e-2)


def test_every_change_is_recorded_once_and_what_crosses_fits() -> None:
    done = pf.run(LI, tiny(), topology="dual-ring", fail=SCRIPT)
    assert done.faults == RECORDED
    ways = {t: [(c.source, c.to, c.hops) for c in done.ledger.crossings() if c.tick == t]
            for t in (2, 3, 5, 8)}  # fmt: skip
    whole = [("M2", "M0", 1), ("M0", "M1", 1), ("M1", "M2", 1)]
    assert ways[2] == whole
    assert ways[3] == [("M2", "M0", 1), ("M0", "M1", 2), ("M1", "M2", 1)]
    assert ways[5] == []  # M0 and M1, between whom nobody is left, go on alone
    assert ways[8] == [("M1", "M0", 1), *whole[1:]]
    trained = {t: {m["node"] for m in done.metrics if m["tick"] == t and "trunk_loss" in m}
               for t in (4, 5, 7, 8)}  # fmt: skip
    assert trained == {4: {"M0", "M1", "M2"}, 5: {"M0", "M1"}, 7: {"M0", "M1"},
                       8: {"M0", "M1", "M2"}}  # fmt: skip


def test_faults_and_absence_add_up() -> None:
    method = pf.FedAvg(rounds=3, batch=40)
    done = pf.run(method, tiny(), fail="kill M0 @2", absent={2: ["M1"], 3: ["M0"]})
    assert done.faults == [
        {"tick": 2, "node": "M0", "fault": "killed"},
        {"tick": 2, "node": "M1", "fault": "absent"},
        {"tick": 3, "node": "M0", "fault": "absent"},
    ]
    sent = {(c.tick, c.source) for c in done.ledger.crossings() if c.to == "hub"}
    assert sent == {(1, "M0"), (1, "M1"), (1, "M2"), (2, "M2"), (3, "M1"), (3, "M2")}


class _Stop(Progress):
    """Interrupts a run after a round."""

    def round_done(self, tick: int, accuracies: Any) -> None:
        if tick == 6:
            raise KeyboardInterrupt


def test_a_run_that_goes_on_knows_what_is_broken(tmp_path: Path) -> None:
    whole = pf.run(LI, tiny(), topology="dual-ring", fail=SCRIPT)
    with pytest.raises(KeyboardInterrupt):
        pf.run(LI, tiny(), topology="dual-ring", fail=SCRIPT, folder=tmp_path / "run",
               progress=_Stop())  # fmt: skip
    again = pf.resume(tmp_path / "run", nodes=tiny())
    assert list(again.faults) == RECORDED
    for name, node in whole.nodes.items():
        other = again.nodes[name].model.state()
        assert all(torch.equal(t, other[n]) for n, t in node.model.state().items())


@pytest.mark.parametrize(
    ("script", "error", "expected"),
    [
        ("kill M9 @1", UnknownNameError, "unknown node in fault 'kill M9 @1'"),
        ("kill M1", ConfigError, "fault 'kill M1' is not understood. Write 'cut A-B @ROUND'"),
    ],
)
def test_bad_scripts_stop_before_training(
    script: str, error: type[Exception], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=expected):
        pf.run(LI, tiny(), fail=script, folder=tmp_path / "run")
    with pytest.raises(error, match=expected):
        pf.compare([LI], tiny(), seeds=1, fail=script)
    assert not list(tmp_path.iterdir())


def test_all_methods_of_a_comparison_meet_the_faults() -> None:
    methods = [
        pf.CWT(rounds=2, batch=40),
        pf.FedAvg(rounds=2, batch=40),
        pf.Joint(rounds=2, batch=40),
    ]
    done = pf.compare(methods, tiny(), seeds=1, fail="kill M1 @2")
    assert {label: len(runs[0].faults) for label, runs in done.runs.items()} == {
        "cwt": 1, "fedavg": 1, "joint": 1,
    }  # fmt: skip


def call(*args: str) -> str:
    result = CliRunner().invoke(cli.app, list(args), prog_name="polyfed")
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_the_command_of_the_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC and issue: faults show in the summary, right away and later."""
    monkeypatch.chdir(tmp_path)
    options = ("--rounds", "8", "--batch", "75", "--evaluate-every", "8", "--folder", "here")
    said = call(
        "run", "li", "--task", "digits", "--topology", "dual-ring", "--fail", SCRIPT, *options
    )
    line = "2 faults: M0-M1 cut (1), M2 killed (1), M2 healed (1), M0-M1 healed (1)"
    assert f"{line}; see here/faults.jsonl" in said
    shown = call("show", "here")
    assert line in shown
    assert "topology=dual-ring" in " ".join(shown.split())
    assert f"fail={SCRIPT}" in " ".join(shown.split())
