import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed import methods, tasks
from polyfed.cli.config import schema
from typed import call

TINY = """
method: local
options: {rounds: 1, init_epochs: 1, local_epochs: 1}
task: digits
task_options: {labels: 3}
settings: {seed: 4, stack: never}
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("tiny.yaml").write_text(TINY)


def run(*args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What it said, and what the new folder holds."""
    said = json.loads(call("run", *args, "--json").stdout)
    return said, yaml.safe_load((Path(said["folder"]) / "config.yaml").read_text())


def test_a_file_and_its_run_folder_repeat_it() -> None:
    first, config = run("tiny.yaml")
    assert first["seed"] == 4
    assert config["options"]["rounds"] == 1
    assert config["options"]["batch"] == 0.2, "the task's recipe"
    assert config["task_options"]["labels"] == 3
    again, same = run(f"{first['folder']}/config.yaml")
    assert again["folder"] != first["folder"]
    assert again["accuracy"] == first["accuracy"]
    assert same == config


def test_overrides_then_typed_options() -> None:
    _, config = run(
        *("--lr", "0.02", "tiny.yaml", "method.rounds=2", "task.labels=2", "settings.seed=9"),
        *("--labels", "4", "--seed", "8"),
    )
    assert config["options"]["rounds"] == 2
    assert config["options"]["lr"] == 0.02
    assert config["options"]["init_epochs"] == 1, "the file's"
    assert config["task_options"]["labels"] == 4
    assert config["settings"]["seed"] == 8
    assert config["settings"]["stack"] == "never"


def test_another_method_has_its_own_options() -> None:
    _, config = run("tiny.yaml", "method=fedavg", "method.rounds=0")
    assert config["method"] == "fedavg"
    assert config["options"]["local_epochs"] == 10, "the recipe's, not the file's"


def test_topology() -> None:
    averaging = ("method=partial-averaging", "method.rounds=0")
    _, config = run("tiny.yaml", *averaging, "topology=gossip:cycles=2")
    assert config["topology"].startswith("gossip:")
    assert "cycles=2" in config["topology"]


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("", [], "holds no settings"),
        ("a: [", [], "is not YAML"),
        ("task: digits", [], "names no method"),
        ("method: fedlnked", [], "Did you mean 'fedlinked'"),
        ("method: local\nrounds: 3", [], "unknown setting in x.yaml 'rounds'"),
        ("method: local\noptions: 3", [], "options must be"),
        ("method: local\noptions: {round: 3}", [], "Did you mean 'rounds'"),
        ("method: local\nsettings: {seeds: 3}", [], "Did you mean 'seed'"),
        ("method: local\nmethods: {}", [], "of a comparison"),
        ("method: local\ntask: null", [], "nodes of your own"),
        ("method: 3", [], "method must be a name, got 3"),
        ("method: local\ntask: {a: 1}", [], "task must be a name, got {'a': 1}"),
        ("method: local\ntopology: 3", [], "topology must be a name, got 3"),
        ("method: local", ["rounds"], "write method.rounds=20"),
        ("method: local", ["rounds=3"], "unknown setting to override 'rounds'"),
        ("method: local", ["metod.rounds=3"], "There are: method, method.NAME"),
        ("method: local", ["method.rounds=x"], "does not fit"),
    ],
)
def test_what_is_wrong_in_a_file(text: str, more: list[str], says: str) -> None:
    Path("x.yaml").write_text(text)
    failed = call("run", "x.yaml", *more, code=2)
    assert says in " ".join(failed.stderr.split())
    assert not Path("runs").exists()


def test_no_such_file() -> None:
    assert "could not read no.yaml" in call("run", "no.yaml", code=2).stderr


def test_overrides_need_a_file() -> None:
    assert "can only follow a config file" in call("run", "local", "method.lr=1", code=2).stderr


def test_track() -> None:
    pytest.importorskip("tensorboard")
    said, _ = run("tiny.yaml", "--track", "tensorboard")
    assert list((Path(said["folder"]) / "tensorboard").iterdir())
    assert "Did you mean 'wandb'" in call("run", "tiny.yaml", "--track", "wandbb", code=2).stderr


# ---- schema --------------------------------------------------------------------------------------


def test_schema_is_printed() -> None:
    assert json.loads(call("schema").stdout) == json.loads(json.dumps(schema()))


def test_schema_judges() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(schema())
    jsonschema.Draft202012Validator.check_schema(schema())

    def errors(text: str) -> int:
        return len(list(checker.iter_errors(yaml.safe_load(text))))

    assert errors(TINY) == 0
    assert errors("task: digits") == 1
    assert errors("method: fedlnked") == 1
    assert errors("method: local\nrounds: 3") == 1
    assert errors("method: local\noptions: {eta: 1}") == 1
    assert errors("method: fedlinked\noptions: {eta: 1}") == 0
    assert errors("method: fedlinked\noptions: {eta: high}") == 1
    assert errors("method: fedlinked\noptions: {normalise: some}") == 1
    assert errors("method: local\ntask: digits\ntask_options: {partition: iid}") == 1
    assert errors("method: local\nsettings: {stack: sometimes}") == 1


def test_schema_takes_what_a_run_folder_holds() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    _, config = run("tiny.yaml", "method.rounds=0")
    jsonschema.validate(config, schema())


def test_schema_knows_every_option_and_its_help() -> None:
    said = {rule["if"]["properties"].popitem()[1]["const"]: rule for rule in schema()["allOf"]}
    assert set(said) == {*methods.METHODS, *tasks.TASKS}
    eta = said["fedlinked"]["then"]["properties"]["options"]["properties"]["eta"]
    assert eta == {
        "type": "number",
        "default": 2.97,
        "description": "norm of a receiver's utilities",
    }
