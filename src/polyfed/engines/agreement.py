"""What all parties must agree on, and the run folder of a party, which belongs to one agreement.

The terms are all of the federation file that has a bearing on the numbers, with the defaults filled
in. Parties tell each other theirs, a folder keeps those that it was begun with, and where two
differ what differs is said. How long to wait (grace, patience) is no part of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed import topologies
from polyfed.engines.charter import Charter
from polyfed.engines.local import Settings
from polyfed.engines.run import plain
from polyfed.engines.site import Federation, Site
from polyfed.engines.store import FACTS
from polyfed.errors import ConfigError, MessageError
from polyfed.record import Recorder, checkpoint
from polyfed.record.checkpoint import Checkpoint
from polyfed.record.recorder import read_config, read_result

Terms = Mapping[str, str]
NEW_RUN = "For a new run write another `folder` in the site file, at all sites."
_MOST = 10_000  # terms, and letters of one, that anybody may tell
_SHOWN = 3  # differences that are said
_LONGEST = 80  # letters of one


def terms_of(charter: Charter) -> dict[str, str]:
    """What must be the same at all parties, as text."""
    options = {f"options: {name}": value for name, value in plain(charter.method).items()}
    terms = {
        "run": charter.run,
        "method": charter.method.name,
        **options,
        "topology": topologies.label(charter.topology),
        "host": charter.host,
        "nodes": list(charter.nodes),
        "seed": charter.seed,
        "evaluate_every": charter.evaluate_every,
    }
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in terms.items()}


def read_terms(found: Any) -> dict[str, str]:
    """The terms of another party; anything else is refused."""
    if not isinstance(found, dict) or len(found) > _MOST:
        raise MessageError(f"not the terms of a run: {found!r}"[:200])
    if not all(isinstance(each, str) and len(each) <= _MOST for each in found.values()):
        raise MessageError("terms of a run that are no text, or too long")
    return found


def differences(here: Terms, there: Terms, place: str = "there") -> str:
    """What differs, in words; nothing if all is the same.

    >>> differences({"seed": "0", "run": "x"}, {"seed": "1", "run": "x"}, "at a")
    'seed is 0 here and 1 at a'
    """
    names = [n for n in dict.fromkeys((*here, *there)) if here.get(n) != there.get(n)]
    said = [
        f"{name[:_LONGEST]} is {_short(here.get(name))} here and {_short(there.get(name))} {place}"
        for name in names[:_SHOWN]
    ]
    if len(names) > len(said):
        said.append(f"and {len(names) - len(said)} more")
    return ", ".join(said)


def run_config(site: Site, federation: Federation, charter: Charter) -> dict[str, Any]:
    """What a party's run folder says about the run."""
    settings = Settings(seed=charter.seed, device=site.device, stack="never")
    return {
        "method": charter.method.name,
        "options": plain(charter.method),
        "task": None if site.node is None or ":" in site.node else site.node,
        "task_options": site.node_options,
        "topology": topologies.label(charter.topology),
        "settings": {**plain(settings), "evaluate_every": charter.evaluate_every},
        "party": site.name,
        "federation": plain(federation),
        "agreed": terms_of(charter),
    }


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a party's folder holds the result of this run; raises ConfigError if of another."""
    if not (folder / "config.yaml").exists():
        return False
    is_over = read_result(folder) is not None
    if is_over or checkpoint.latest(folder / "checkpoints") is not None:
        _check_same(folder, config, is_over)
    return is_over


def _check_same(folder: Path, config: Mapping[str, Any], is_over: bool) -> None:
    found = read_config(folder)
    said = differences(_kept(config), _kept(found)) if "agreed" in found else ""
    if not said:
        return
    way = (
        f"to see it: polyfed show {folder}"
        if is_over
        else "to go on with it, put the federation file back as it was"
    )
    raise ConfigError(
        f"{folder} holds {'the result of ' if is_over else ''}a run with another configuration: "
        f"{said}. Nothing was changed there; {way}. {NEW_RUN}"
    )


def open_folder(folder: Path, config: Mapping[str, Any]) -> tuple[Recorder, Checkpoint | None]:
    """The folder of a party, made or as it stands, and its newest checkpoint.

    What was begun with another configuration and never came to a first round gives way.
    """
    if not (folder / "config.yaml").exists():
        return Recorder.create(folder, config), None
    is_finished(folder, config)
    if _kept(read_config(folder)) == _kept(config):
        return Recorder.reopen(folder)
    recorder, point = Recorder.reopen(folder, config)
    if point is None:
        (folder / FACTS).unlink(missing_ok=True)
    return recorder, point


def _kept(config: Mapping[str, Any]) -> dict[str, str]:
    return {"name": config.get("party", ""), **config.get("agreed", {})}


def _short(value: str | None) -> str:
    return "not given" if value is None else value[:_LONGEST]
