"""The unit and the container file of examples/deploy: they start what the guide says they start."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyfed.cli import app

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "deploy" / "polyfed-peer@.service"
CONTAINER = ROOT / "examples" / "deploy" / "Containerfile"
GUIDE = ROOT / "docs" / "across_machines.md"


def test_the_guide_shows_the_unit_as_it_is() -> None:
    assert f"```ini\n{UNIT.read_text()}```" in GUIDE.read_text()


def test_the_unit_starts_a_peer_again_until_it_has_finished() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    program, command, site = service["ExecStart"].split()
    assert (Path(program).name, command, site) == ("polyfed", "peer", "%i.yaml")
    assert (service["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("on-failure", "0")
    assert service["WorkingDirectory"] == service["ReadWritePaths"]
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that is there in place of the one that will be."""
    text = UNIT.read_text().replace("/srv/polyfed/venv/bin/polyfed", "/bin/true")
    unit = tmp_path / "polyfed-peer@cleveland.service"
    unit.write_text(text.replace("User=polyfed\n", ""))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr
    unit.write_text(text.replace("Restart=on-failure", "Restart=sometimes"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert unit.name in done.stderr  # so it does look


def test_the_container_holds_what_is_installed_and_is_nobody_special() -> None:
    text = re.sub(r"\\\n\s*", "", CONTAINER.read_text())
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    verbs = [verb for verb, _ in lines]
    assert verbs[0] == "FROM"
    assert verbs.index("USER") < verbs.index("ENTRYPOINT") < verbs.index("CMD")
    given = dict(lines)
    assert given["USER"] == "10001"
    assert (given["ENTRYPOINT"], given["CMD"]) == ('["polyfed"]', '["peer", "site.yaml"]')
    copied = [path for verb, rest in lines if verb == "COPY" for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    assert {"pyproject.toml", "src"} <= set(copied)
