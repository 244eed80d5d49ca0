"""The page in a real browser: it draws, asks for nothing, and its switches do what they say."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.report.page import write_report
from polyfed.report.watch import server
from polyfed.testing.federations import tiny

pytestmark = pytest.mark.browser
SECTIONS = ["result", "rounds", "cost", "work", "holds", "ledger", "settings"]


@pytest.fixture
def opened(page: Any) -> Iterator[Any]:
    """Opens files; whatever a test did, there was no complaint and no request."""

    def load(path: Path) -> Any:
        page.open(path)
        return page

    yield load
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "about:"))] == []


def shown(page: Any) -> list[str]:
    ids = "[...document.querySelectorAll('section:not([hidden])')].map(s => s.id)"
    return list(page.run(ids))


def of_seeds(make: Any, *lifts: tuple[str, float], seeds: int = 5) -> list[Path]:
    return [
        make(f"{method}-{seed}", method=method, seed=seed, lift=lift)
        for method, lift in lifts
        for seed in range(seeds)
    ]


def test_one_run(make: Any, opened: Any) -> None:
    page = opened(write_report([make(task="digits")]))
    assert page.text("h1") == "fedavg on digits"
    assert shown(page) == SECTIONS
    assert page.count("#result tbody tr") == 4
    assert page.text("#result tr.sum td:nth-child(3)") == "0.501"
    assert page.count("#rounds svg path.curve") == 8  # three nodes and their mean, twice
    assert page.count("#work svg rect.block") == 12
    assert page.count("#holds svg circle") > 9
    assert "polyfed run fedavg --task digits" in page.text("#settings pre")


def test_several_runs(make: Any, opened: Any, tmp_path: Path) -> None:
    folders = of_seeds(make, ("fedavg", 0.2), ("local", 0.0))
    page = opened(write_report(folders, tmp_path / "all.html"))
    assert "fedavg is 0.200 above local" in page.text(".verdicts li.holds")
    assert page.count("#result tbody tr") == 2
    assert page.text("#result td.best") == "0.700± 0.000"
    assert page.count("#rounds .card:first-child path.curve") == 2
    page.click("#rounds .chip:nth-child(2)")
    assert page.count("#rounds .card:first-child path.curve") == 1
    page.click("#rounds .chip:nth-child(2)")
    page.click("#rounds .choice button:nth-child(2)")  # every node
    assert page.count("#rounds .card:first-child path.curve") == 2 + 2 * 3
    page.type("#rounds select[aria-label=Node]", "M1", "change")
    assert page.count("#rounds .card:first-child path.curve") == 2
    page.type("#work select[aria-label=Run]", "7", "change")
    assert "local, seed 2" in page.text("#settings")
    assert page.run("document.querySelector('#ledger select[aria-label=Run]').value") == "7"


def test_the_axis_can_be_seconds_or_bytes(make: Any, opened: Any) -> None:
    page = opened(write_report([make()]))
    last = "[...document.querySelectorAll('#rounds .card:first-child text')].at(-1).textContent"
    ends = {}
    for i, what in enumerate(("rounds", "seconds", "bytes"), 1):
        page.click(f"#rounds > .head > .choice:last-child button:nth-child({i})")
        ends[what] = page.run(last)
    assert ends["rounds"] == "4"
    assert float(ends["seconds"].removesuffix(" s")) > 10  # 15 in all, 5 in the last round
    assert int(ends["bytes"].removesuffix(" B")) > 500  # 864 in all, 216 a round


def test_the_spread_is_the_sample_s(make: Any, opened: Any, tmp_path: Path) -> None:
    folders = [make(f"s{seed}", rounds=2, seed=seed) for seed in (0, 500, 1000)]
    page = opened(write_report(folders, tmp_path / "all.html"))
    assert page.text("#result tbody td:nth-child(2)") == "0.400± 0.100"  # 0.3, 0.4 and 0.5


def test_figures_can_be_chosen(make: Any, opened: Any) -> None:
    metrics = [{"tick": t, "node": "M0", "mixing_weight": t / 10} for t in range(5)]
    page = opened(write_report([make(metrics=metrics)]))
    page.type("#rounds select[aria-label=Figure]", "mixing_weight", "change")
    assert page.text("#rounds .card:nth-child(2) h3") == "Mixing weight"
    assert page.count("#rounds .card:nth-child(2) path.curve") == 2  # M0 and the mean


def test_the_ledger_filters(make: Any, opened: Any) -> None:
    page = opened(write_report([make(nodes=12, rounds=10)]))
    total = "#ledger .total"
    assert page.text(total) == "240 messages, 8.6 kB"
    assert page.count("#ledger table.ledger tbody tr") == 20
    page.type("#ledger input[type=search]", "m07 weight")
    assert page.text(total) == "20 messages, 720 B"
    page.type("#ledger select[aria-label=Receiver]", "hub", "change")
    assert page.text(total) == "10 messages, 360 B"
    page.type("#ledger input[type=number]", "3")
    assert page.text(total) == "1 message, 36 B"
    cells = "[...document.querySelectorAll('table.ledger tbody td')].map(td => td.textContent)"
    tensors = "weight 4×2 float32, bias scalar float32"
    assert page.run(cells) == ["3", "M07", "hub", tensors, "1", "36"]
    page.type("#ledger input[type=search]", "nobody")
    assert "No message is like that." in page.text("table.ledger")


def test_the_ledger_as_a_file(make: Any, opened: Any) -> None:
    """What would be saved: caught where the browser makes a file of it."""
    page = opened(write_report([make(nodes=2, rounds=2)]))
    page.run(
        "URL.createObjectURL = blob => { window.saved = blob.text(); return 'data:,'; };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; }; 1"
    )
    page.click("#ledger button.csv")
    lines = page.run("window.saved").splitlines()
    assert page.run("window.named") == "ledger-fedavg-seed-0.csv"
    assert lines[0] == "first_round,last_round,messages,from,to,hops,tensor,shape,dtype,bytes"
    assert lines[1] == "1,1,1,M0,hub,1,weight,4x2,float32,32"
    assert len(lines) == 1 + 2 * 4 * 2
    assert sum(int(line.rpartition(",")[2]) for line in lines[1:]) == 8 * 36


def test_light_and_dark(make: Any, opened: Any) -> None:
    page = opened(write_report([make(task="digits")]))
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.run(paper)
    page.prefer("dark")
    dark = page.run(paper)
    assert light != dark
    page.click("#theme")
    assert (page.text("#theme"), page.run(paper)) == ("light", light)
    page.prefer("light")
    page.click("#theme")
    assert (page.text("#theme"), page.run(paper)) == ("dark", dark)
    ink = "getComputedStyle(document.querySelector('#holds text')).fill"
    assert page.run(ink) == page.run("getComputedStyle(document.body).color")
    page.click("#theme")
    assert (page.text("#theme"), page.run(paper)) == ("auto", light)


@pytest.mark.parametrize("width", [320, 390, 820])
def test_nothing_sticks_out_on_a_phone(width: int, make: Any, opened: Any, page: Any) -> None:
    page.resize(width, 844)
    page = opened(write_report([make(task="digits", nodes=12, rounds=30)]))
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.count("#rounds path.curve") > 0


def test_rings_and_faults(make: Any, opened: Any) -> None:
    faults = [{"tick": 3, "node": "M0-M1", "fault": "cut"}]
    folder = make(
        method="li", rounds=6, topology="dual-ring", fail="cut 0-1 @3; kill M2 @5", faults=faults
    )
    page = opened(write_report([folder]))
    assert "cannot be told" in page.text("#work")  # the messages are those of a star
    (folder / "ledger.jsonl").write_text("")
    page = opened(write_report([folder]))
    assert page.count("#work svg .flag") == 1
    assert page.count("#work svg .away") == 2
    assert page.count("#work svg line.cut") == 1  # the picture opens at the first fault
    assert page.count("#work svg path.say[d*=Q]") == 4  # M0 to M1 goes the other way round
    page.type("#work .side > :last-child input", "0")
    assert page.count("#work svg line.cut") == 0
    page.click("#work .events button")
    assert page.count("#work svg line.cut") == 1


def test_matrices_maps_and_front(make: Any, opened: Any, tmp_path: Path) -> None:
    rows = [[0, 1.5, 2.5], [2, 0, 1], [1, 3, 0]]
    noted = [
        {"tick": t, "node": "hub", "utilities": {"nodes": ["M0", "M1", "M2"], "rows": rows}}
        for t in range(1, 20)
    ]
    page = opened(write_report([make("many", rounds=19, metrics=noted)]))
    assert page.count("#own svg rect") == 6
    page.type("#own input", "3")
    assert "round 4" in page.text("#own .slider")
    page = opened(write_report([make("few", rounds=4, metrics=noted[:4])]))
    assert page.count("#own .tiles svg") == 4
    losses = {"h1": (0.9, 0.1), "h2": (0.5, 0.5), "h3": (0.1, 0.9), "worse": (0.6, 0.6)}
    folders = [
        make(
            name,
            options={"local_epochs": k},
            metrics=[
                {"tick": 4, "node": "hub", "val_rb_loss": on_labels, "val_rb_accuracy": 0.5},
                {"tick": "final", "node": "M0", "surrogate_loss": on_sets},
            ],
        )
        for k, (name, (on_sets, on_labels)) in enumerate(losses.items())
    ]
    page = opened(write_report(folders, tmp_path / "front.html"))
    assert page.count("#own .card:last-child circle") == 4
    assert page.count("#own .card:last-child circle[fill='var(--card)']") == 1  # beaten by h2
    assert "front between the two losses" in page.text("#own")


def test_real_runs(opened: Any, tmp_path: Path) -> None:
    method = pf.FedLinked(rounds=2, batch=8, init_epochs=1, distil_epochs=1, local_epochs=1)
    run = pf.run(method, tiny(), folder=tmp_path / "run")
    page = opened(tmp_path / "run" / "report.html")
    assert page.text("h1") == "fedlinked on own nodes"
    assert page.text("#result tr.sum td:nth-child(3)") == f"{run.mean_accuracy:.3f}"
    assert page.count("#own .tiles svg") == 2


def test_empty_states(make: Any, opened: Any) -> None:
    folder = make(rounds=0, finished=False, method="local", topology="alone")
    for name in ("metrics", "ledger"):
        (folder / f"{name}.jsonl").write_text("")
    page = opened(write_report([folder]))
    assert "No accuracy yet." in page.text("#result")
    assert "Nothing left any node" in page.text("#ledger")
    assert "No round is over yet." in page.text("#work")


def test_one_value_is_a_dot(make: Any, opened: Any) -> None:
    page = opened(write_report([make(rounds=0)]))
    assert page.count("#rounds svg circle") == 4  # three nodes and their mean
    assert "No other figure was noted." in page.text("#rounds")


@pytest.mark.slow
def test_a_hundred_nodes_and_five_hundred_rounds(large: Path, page: Any) -> None:
    assert page.open(large) < 3
    assert page.errors == []
    assert page.text("#ledger .total") == "100,000 messages, 3.6 MB"
    page.type("#ledger input[type=search]", "M42")
    assert page.text("#ledger .total") == "1,000 messages, 36.0 kB"


def test_watch_follows_a_run(make: Any, page: Any, tmp_path: Path) -> None:
    folder = make(finished=False)
    with server(folder) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            page.open(f"http://127.0.0.1:{serving.server_port}/")
            assert "round 4 of 4" in page.text(".facts")
            page.click("#rounds .choice button:nth-child(1)")  # mean
            with (folder / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"tick": 5, "node": "M0", "test_accuracy": 0.875}) + "\n")
                log.write(json.dumps({"tick": 5, "seconds": 9.0}) + "\n")
            page.run(
                "new Promise(r => setInterval(() => "
                "document.querySelector('.facts').textContent.includes('round 5') && r(1), 50))"
            )
            assert "0.875" in page.text("#result")
            assert page.text("#rounds .choice [aria-pressed=true]") == "mean"
            assert page.errors == []
        finally:
            serving.shutdown()
            thread.join()
