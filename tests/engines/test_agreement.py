"""What parties must agree on, and folders that were begun with something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polyfed as pf
from polyfed import topologies
from polyfed.cli import app
from polyfed.engines.agreement import differences, is_finished, open_folder, terms_of
from polyfed.engines.charter import Charter
from polyfed.engines.store import FolderStore
from polyfed.errors import ConfigError, RunError
from polyfed.record.recorder import read_config
from polyfed.testing import tiny


def charter(rounds: int = 3, **more: Any) -> Charter:
    ring, nodes = topologies.make("ring"), ("M0", "M1", "M2")
    return Charter(run="t", method=pf.LI(rounds=rounds), topology=ring, nodes=nodes, **more)


def config(**more: Any) -> dict[str, Any]:
    return {"method": "li", "party": "M0", "agreed": terms_of(charter(**more))}


def test_terms_are_what_has_a_bearing_on_the_numbers() -> None:
    terms = terms_of(charter())
    assert terms["options: rounds"] == "3"
    assert terms["nodes"] == '["M0", "M1", "M2"]'
    assert terms_of(charter(grace=1.0, patience=5.0, resend=0.1, largest=1000)) == terms
    for other in ({"seed": 1}, {"rounds": 4}, {"evaluate_every": 2}):
        assert terms_of(charter(**other)) != terms


def test_what_differs_is_said_and_not_all_of_it() -> None:
    here, there = terms_of(charter()), terms_of(charter(rounds=5, seed=1))
    said = differences(here, there, "at M1")
    assert said == "options: rounds is 3 here and 5 at M1, seed is 0 here and 1 at M1"
    assert differences(here, here) == ""
    assert differences({}, here).endswith(f"and {len(here) - 3} more")
    assert differences({"x": "y" * 500}, {}) == f"x is {'y' * 80} here and not given there"


def begun(folder: Path) -> None:
    recorder, point = open_folder(folder, config())
    assert point is None
    FolderStore(recorder).keep({"born": 1})
    recorder.close()


def test_a_folder_in_which_nothing_was_played_gives_way(tmp_path: Path) -> None:
    """A site that was refused for its federation file goes on when that is put right."""
    folder = tmp_path / "run"
    begun(folder)
    recorder, _ = open_folder(folder, config())
    assert FolderStore(recorder).facts() == {"born": 1}
    recorder.close()
    assert not is_finished(folder, config(rounds=5))
    recorder, point = open_folder(folder, config(rounds=5))
    assert point is None
    assert FolderStore(recorder).facts() == {}
    assert read_config(folder)["agreed"]["options: rounds"] == "5"
    recorder.close()


def test_a_folder_of_a_run_that_has_begun_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder)
    recorder, _ = open_folder(folder, config())
    FolderStore(recorder).save((0, 0, 0), [tiny()[0]])
    recorder.close()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    match = r"holds a run with another configuration: options: rounds is 5 here and 3 there.*back"
    for ask in (is_finished, open_folder):
        with pytest.raises(ConfigError, match=match):
            ask(folder, config(rounds=5))
    with pytest.raises(ConfigError, match="name is M1 here and M0 there"):
        is_finished(folder, {**config(), "party": "M1"})
    assert {path: path.read_bytes() for path in before} == before
    recorder, point = open_folder(folder, config())
    assert point is not None
    recorder.finish({"accuracy": {}})
    assert is_finished(folder, config())
    with pytest.raises(ConfigError, match=r"the result of a run with another.*polyfed show"):
        is_finished(folder, config(rounds=5))


def test_a_folder_that_another_process_has_is_not_touched(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    recorder, _ = open_folder(tmp_path / "run", config())
    with pytest.raises(RunError, match="being written by another process"):
        open_folder(tmp_path / "run", config(rounds=5))
    assert read_config(tmp_path / "run")["agreed"]["options: rounds"] == "3"
    recorder.close()


def test_a_partys_folder_goes_on_with_its_own_command_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = {"method": "li", "options": {"rounds": 3}, "task": "heart", "task_options": {}}
    recorder, _ = open_folder(folder, {**config(), **more, "topology": "ring", "settings": {}})
    recorder.close()
    with pytest.raises(RunError, match=r"party's part of a run across machines.*polyfed peer SITE"):
        pf.resume(folder)
    shown = CliRunner().invoke(app, ["show", str(folder)])
    assert "not finished: 0 of 3 rounds; continue with: polyfed peer SITE.yaml" in shown.output
