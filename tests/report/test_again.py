"""The line that a report prints does repeat the run."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyfed import cli, methods
from polyfed.core.method import Method
from polyfed.engines.run import Run
from polyfed.record.recorder import read_config
from polyfed.report.again import OWN_NODES, Again, command, make_again

LINES = (
    "polyfed run fedlinked --task digits --quick --no-transform --eta 1.5 --rounds 0",
    "polyfed run fedavg --task digits --labels 9 --rounds 0 --seed 3",
    "polyfed run li --task digits --quick --rounds 2 --topology dual-ring "
    "--fail 'cut 0-1 @1; heal @2'",
    "polyfed run partial-averaging --task digits-permuted --nodes 5 --groups 'a=0-4-2-0@M0+M1' "
    "--rounds 0 --topology gossip:cycles=2",
    "polyfed compare fedavg fedavg:local-epochs=2 local --task digits --rounds 0 --seeds 2",
    "polyfed compare fedavg --task digits --quick --rounds 0 --seeds 3,7 --evaluate-every 2",
)


def typed(line: str, folder: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, [*shlex.split(line)[1:], "--folder", folder])
    assert result.exit_code == 0, result.output
    return read_config(Path(folder))


def without_labels(config: dict[str, Any]) -> Any:
    methods_ = config.get("methods")
    return {**config, "methods": methods_ and list(methods_.values())}


@pytest.mark.parametrize("line", LINES)
def test_the_line_repeats_it(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = typed(line, "first")
    again = command(first)
    assert without_labels(typed(again, "again")) == without_labels(first)
    assert len(again) <= len(line) + 30  # it says only what is not usual


def test_own_nodes_and_own_methods_have_no_line(make: Any) -> None:
    run = Run.open(make())
    assert (command(run.config), make_again(run)) == ("", OWN_NODES)
    mine = Run.open(make("other", task="digits"))
    mine = replace(mine, config={**mine.config, "method": "mine"})
    assert command(mine.config) == ""
    assert "unknown method 'mine'" in str(make_again(mine))


def test_a_task_whose_files_are_not_here(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    found = make_again(Run.open(make(task="mnist")))
    assert isinstance(found, str)
    assert "--data DIR" in found


def test_hubs_are_no_parties(make: Any) -> None:
    run = Run.open(make(task="digits-sets", method="fedul-m1"))
    found = make_again(run)
    assert isinstance(found, Again)
    assert "hub" in [node.name for node in found.nodes]
    assert "hub" not in [node.name for node in found.parties]
    assert isinstance(found.method, Method)
    assert found.method == methods.make("fedul-m1", run.config["options"])


def test_a_federation_is_made_once_for_all_methods(make: Any) -> None:
    made: dict[str, Any] = {}
    found = [
        make_again(Run.open(make(name, method=name, task="digits", seed=seed)), made)
        for name, seed in (("fedavg", 0), ("local", 0), ("fedper", 1))
    ]
    nodes = [again.nodes for again in found if isinstance(again, Again)]
    assert nodes[0] is nodes[1]
    assert nodes[2] is not nodes[0]
    assert len(made) == 1
