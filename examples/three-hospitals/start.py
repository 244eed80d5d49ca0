"""Four hospitals train together on this machine, each a process of its own.

    python examples/three-hospitals/start.py --data DIR [--engine flower] [--rounds 20] [--out OUT]

Writes certificates and a site file for each hospital, starts them, and prints what each has learnt
and every byte that left it. By default they are peers (`polyfed peer SITE.yaml`, LI on a ring, and
nobody in between); with `--engine flower` a hub links what they learn (`polyfed hub` and `polyfed
node SITE.yaml`, FedLinked). DIR holds the four published files processed.cleveland.data, ... (UCI
heart disease).
"""

import argparse
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from polyfed.engines.certificates import make_certificates
from polyfed.engines.run import Run

HERE = Path(__file__).resolve().parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HUB = "hub"
LI: dict[str, Any] = {"method": "li", "topology": "dual-ring", "options": {"lr": 0.005}}
FEDLINKED: dict[str, Any] = {"method": "fedlinked", "options": {"lr": 0.005, "batch": 32}}


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_sites(out: Path, data: Path, rounds: int, engine: str) -> list[Path]:
    """What a consortium writes once (certificates, the federation), and each party its site."""
    parties = HOSPITALS if engine == "peer" else (HUB, *HOSPITALS)
    make_certificates(out, parties)
    what = LI if engine == "peer" else FEDLINKED
    options = {**what["options"], "rounds": rounds}
    federation = {"run": "heart", "nodes": list(HOSPITALS), **what, "options": options}
    federation["grace"] = 60.0  # seconds: all start at once here, on however slow a machine
    (out / "federation.yaml").write_text(yaml.safe_dump(federation, sort_keys=False))
    ports = dict(zip(parties, free_ports(len(parties)), strict=True))
    sites = []
    for name in parties:
        site: dict[str, Any] = {
            "name": name,
            "federation": "federation.yaml",
            "authority": "ca.pem",
            "certificate": f"{name}.pem",
            "key": f"{name}.key",
            "folder": f"run-{name}",
        }
        if engine == "peer" or name == HUB:
            site["listen"] = [f"tls/127.0.0.1:{ports[name]}"]
        if name != HUB:
            known = parties[0] if name != parties[0] else parties[1]
            public = {} if engine == "peer" else {"public": 200}
            site["node"] = "hospital:node"
            site["node_options"] = {"file": str(data / f"processed.{name}.data"), **public}
            site["connect"] = [f"tls/127.0.0.1:{ports[known]}"]
        sites.append(out / f"{name}.yaml")
        sites[-1].write_text(yaml.safe_dump(site, sort_keys=False))
    return sites


def main() -> None:
    """Write, start, wait, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--engine", choices=("peer", "flower"), default="peer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("three-hospitals"))
    given = parser.parse_args()
    folder = given.data / "heart_disease"
    data = (folder if folder.is_dir() else given.data).resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    sites = write_sites(given.out.resolve(), data, given.rounds, given.engine)
    verbs = {HUB: "hub"}
    other = "peer" if given.engine == "peer" else "node"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "polyfed", verbs.get(site.stem, other), "--quiet", str(site)],
            cwd=HERE,
            stdout=subprocess.DEVNULL,
        )
        for site in sites
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit("a hospital did not come to the end: see above")
    for name in HOSPITALS:
        run = Run.open(given.out / f"run-{name}")
        sent = [crossing for crossing in run.ledger.crossings() if crossing.source == name]
        tensors = ", ".join(tensor["name"] for tensor in sent[0].tensors)
        print(
            f"{name}: test accuracy {run.accuracy[name]:.3f}; {len(sent)} messages left, "
            f"{sum(crossing.bytes for crossing in sent)} bytes: {tensors}"
        )


if __name__ == "__main__":
    main()
