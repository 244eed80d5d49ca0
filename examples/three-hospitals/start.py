"""Four hospitals train together on this machine, each a process of its own, and nobody in between.

    python examples/three-hospitals/start.py --data DIR [--rounds 20] [--out FOLDER]

Writes certificates and a site file for each hospital, starts `polyfed peer SITE.yaml` for each, and
prints what each has learnt and every byte that left it. DIR holds the four published files
processed.cleveland.data, ... (UCI heart disease).
"""

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import yaml

from polyfed.engines.certificates import make_certificates
from polyfed.engines.run import Run

HERE = Path(__file__).resolve().parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_sites(out: Path, data: Path, rounds: int) -> list[Path]:
    """What a consortium writes once (certificates, the federation), and each hospital its site."""
    make_certificates(out, HOSPITALS)
    federation = {
        "run": "heart",
        "method": "li",
        "options": {"rounds": rounds, "lr": 0.005},
        "topology": "dual-ring",
        "nodes": list(HOSPITALS),
    }
    (out / "federation.yaml").write_text(yaml.safe_dump(federation, sort_keys=False))
    ports = dict(zip(HOSPITALS, free_ports(len(HOSPITALS)), strict=True))
    sites = []
    for name in HOSPITALS:
        first = HOSPITALS[0] if name != HOSPITALS[0] else HOSPITALS[1]
        site = {
            "name": name,
            "federation": "federation.yaml",
            "node": "hospital:node",
            "node_options": {"file": str(data / f"processed.{name}.data")},
            "listen": [f"tls/127.0.0.1:{ports[name]}"],
            "connect": [f"tls/127.0.0.1:{ports[first]}"],
            "authority": "ca.pem",
            "certificate": f"{name}.pem",
            "key": f"{name}.key",
            "folder": f"run-{name}",
        }
        sites.append(out / f"{name}.yaml")
        sites[-1].write_text(yaml.safe_dump(site, sort_keys=False))
    return sites


def main() -> None:
    """Write, start, wait, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("three-hospitals"))
    given = parser.parse_args()
    folder = given.data / "heart_disease"
    data = (folder if folder.is_dir() else given.data).resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    sites = write_sites(given.out.resolve(), data, given.rounds)
    command = [sys.executable, "-m", "polyfed", "peer", "--quiet"]
    started = [
        subprocess.Popen([*command, str(site)], cwd=HERE, stdout=subprocess.DEVNULL)
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
