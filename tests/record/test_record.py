"""A run is a folder: whatever happens to disk or process, it goes on to the same numbers."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import polyfed as pf
from polyfed import methods, options, tasks
from polyfed.core.message import Message
from polyfed.core.model import Model
from polyfed.core.node import Node
from polyfed.engines.run import Run
from polyfed.errors import RunError, UnknownNameError
from polyfed.record import Ledger, Log, Recorder, checkpoint
from polyfed.record.files import write_atomically, write_text
from polyfed.record.log import read
from polyfed.record.recorder import read_config, read_result
from polyfed.testing.federations import tiny

FEDLINKED = pf.FedLinked(
    rounds=3, batch=8, init_epochs=1, distil_epochs=1, finetune_epochs=1, local_epochs=1
)
FEDAVG = pf.FedAvg(rounds=3, batch=8)


def figures(run: Run) -> dict[str, Any]:
    """Everything a run says, without how long it took."""
    metrics = [m for m in run.metrics if "seconds" not in m]
    return {
        "accuracy": dict(run.accuracy),
        "metrics": metrics,
        "ledger": run.ledger.crossings(),
        "faults": list(run.faults),
    }


def bits(nodes: dict[str, Node]) -> str:
    """A digest of every model and memory."""
    digest = hashlib.blake2b()
    for node in nodes.values():
        for name, t in sorted((node.model.state() | node.memory).items()):
            raw = t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest.update(f"{node.name} {name} {t.dtype} {list(t.shape)}".encode() + raw)
    return digest.hexdigest()


def same(a: Run, b: Run) -> bool:
    assert figures(a) == figures(b)
    return bits(dict(a.nodes)) == bits(dict(b.nodes))


@contextmanager
def patched(name: str, value: object) -> Iterator[None]:
    """Something of polyfed.record, replaced for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"polyfed.record.{name}", value)
        yield


@pytest.fixture(scope="module")
def whole() -> Run:
    """FedLinked on tiny nodes, never interrupted, never written."""
    return pf.run(FEDLINKED, tiny())


# ---- files ---------------------------------------------------------------------------------------


def test_where_nothing_can_be_written_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("write_text", "unlink"):  # as on a file system that is mounted read-only
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(RunError, match=r"could not write .*x\.html: Read-only file system"):
        write_text(tmp_path / "x.html", "text")


def test_a_place_that_is_no_file_is_an_error_of_ours(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="could not write"):
        write_text(Path(""), "text")


def test_a_folder_without_a_method_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("format: 1\n")
    with pytest.raises(RunError, match="names no method: it is not of a run"):
        read_config(tmp_path)


# ---- logs ----------------------------------------------------------------------------------------


def test_a_log_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = Log(path)
    log.append({"tick": 1})
    length = log.sync()
    log.append({"tick": 2, "name": "é"})
    log.close()
    with path.open("a") as file:
        file.write('{"tick": 3, "na')  # the process died here
    assert read(path) == [{"tick": 1}, {"tick": 2, "name": "é"}]
    again = Log.reopen(path, length)
    assert again.records == [{"tick": 1}]
    assert again.sync() == length
    again.append({"tick": 2})
    assert again.sync() == 2 * length
    again.close()
    assert path.read_text() == '{"tick": 1}\n{"tick": 2}\n'


def test_a_log_shorter_than_its_checkpoint_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RunError, match="has 3 bytes, but its checkpoint counts 10: it was cut"):
        Log.reopen(path, 10)


def test_a_damaged_log_says_which(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"{}\n\xff\x00oops\n{}\n")
    with pytest.raises(RunError, match=r"ledger\.jsonl is damaged"):
        read(path)
    path.write_text("{}\n{}, {}\n")
    with pytest.raises(RunError, match=r"ledger\.jsonl is damaged: 2 lines hold 3 records"):
        read(path)
    assert read(tmp_path / "never written") == []


def test_memory_and_disk_hold_the_same_records(tmp_path: Path) -> None:
    log = Log(tmp_path / "a")
    log.append({"loss": math.nan, "rows": [(1, math.inf), 2.5], "inner": {"x": -math.inf}})
    log.close()
    expected = [{"loss": None, "rows": [[1, None], 2.5], "inner": {"x": None}}]
    assert read(tmp_path / "a") == log.records == expected


def test_the_ledger_writes_what_it_holds(tmp_path: Path) -> None:
    log = Log(tmp_path / "ledger.jsonl")
    ledger = Ledger(log)
    first = Message({"w": torch.zeros(2, 3), 'n\u00ef"': torch.zeros((), dtype=torch.int64)})
    ledger.enter(1, 'M"0', "h\u00fcb\\", first)
    ledger.enter(2, "hub", "M0", Message({"w": torch.zeros(2, 3, dtype=torch.float64)}), 3)
    ledger.enter(2, "hub", "M1", Message({}))
    log.close()
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert lines == [json.dumps(record) for record in log.records]
    assert read(tmp_path / "ledger.jsonl") == log.records
    one, two, none = ledger.crossings()
    assert (one.tick, one.source, one.to, one.bytes, one.hops) == (1, 'M"0', "h\u00fcb\\", 32, 1)
    assert one.tensors[0] == {"name": "w", "shape": [2, 3], "dtype": "float32", "bytes": 24}
    assert [t["bytes"] for t in one.tensors] == [24, 8]
    assert (two.bytes, two.hops, two.tensors[0]["dtype"]) == (48, 3, "float64")
    assert (none.bytes, none.tensors) == (0, [])


def test_ledger_sums() -> None:
    ledger = Ledger(Log())
    small, large = Message({"a": torch.zeros(3)}), Message({"b": torch.zeros(2, 2).double()})
    ledger.enter(1, "A", "hub", small)
    ledger.enter(1, "B", "hub", large)
    ledger.enter(1, "hub", "A", large)
    ledger.enter(2, "A", "hub", Message({**small.tensors, **large.tensors}))
    assert [ledger.bytes_sent(name) for name in ("A", "B", "hub")] == [56, 32, 32]
    assert (ledger.bytes_sent(), len(ledger)) == (120, 4)
    assert (ledger.bytes_received("hub"), ledger.bytes_received("A")) == (88, 32)
    last = ledger.crossings()[-1]
    assert (last.tick, last.source, last.to, last.bytes) == (2, "A", "hub", 44)
    assert last.tensors == [
        {"name": "a", "shape": [3], "dtype": "float32", "bytes": 12},
        {"name": "b", "shape": [2, 2], "dtype": "float64", "bytes": 32},
    ]


def test_a_node_that_there_is_not_has_sent_nothing_and_says_so(tmp_path: Path) -> None:
    run = pf.run(pf.FedAvg(rounds=1, batch=8), tiny(), absent={1: ["M1"]}, folder=tmp_path / "run")
    for ledger in (run.ledger, Run.open(tmp_path / "run").ledger):
        assert (ledger.bytes_sent("M0"), ledger.bytes_received("M0")) == (588, 580)
        assert ledger.bytes_sent("M1") == 0
        for told in (ledger.bytes_sent, ledger.bytes_received):
            with pytest.raises(UnknownNameError, match=r"'m0'.*There are: M0, M1, M2, hub"):
                told("m0")
    alone = pf.run(pf.Local(rounds=1, batch=8), tiny()).ledger
    assert alone.bytes_sent("M2") == 0
    with pytest.raises(UnknownNameError):
        alone.bytes_sent("nobody")


def test_numpy_s_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    pf.run(pf.Local(rounds=0, lr=np.float64(0.25)), tiny(), folder=tmp_path / "run")
    assert read_config(tmp_path / "run")["options"]["lr"] == 0.25


# ---- checkpoints ---------------------------------------------------------------------------------


def nodes_with_everything() -> list[Node]:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    node = Node("A", model=Model.split(net, trunk="0", head="1"))
    square = torch.arange(6.0).reshape(2, 3)
    node.memory = {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "group/turned": square.T,
        "group/square": square,
        "group/row": square[0],  # shares memory with the one above
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3).bfloat16(),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(2**60),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    return [node, Node("hub", memory={"bank": torch.ones(2)})]


def test_checkpoint_round_trip_is_bit_exact(tmp_path: Path) -> None:
    before = nodes_with_everything()
    checkpoint.save(tmp_path, 3, before, {"metrics": 10, "ledger": 20})
    point = checkpoint.latest(tmp_path)
    assert point is not None
    assert (point.tick, point.lengths) == (3, {"metrics": 10, "ledger": 20})
    after = nodes_with_everything()
    for node in after:
        node.memory = {"leftover": torch.ones(1)}
        node.model.load({n: t + 1 for n, t in node.model.state().items()})
    point.load_into(after)
    assert bits({n.name: n for n in after}) == bits({n.name: n for n in before})
    assert after[0].memory.keys() == before[0].memory.keys()


def test_memory_returns_to_where_it_was(tmp_path: Path) -> None:
    there = Node("hub", memory={"bank": torch.ones(2), "step": torch.tensor(3)})
    checkpoint.save(tmp_path, 1, [there], {})
    point = checkpoint.latest(tmp_path)
    assert point is not None
    with safe_open(point.path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    assert json.loads(metadata["devices"]) == {}
    metadata["devices"] = json.dumps({"hub/memory/bank": "meta"})  # as if it had been on a GPU
    save_file(tensors, point.path, metadata)
    again = Node("hub")
    point.load_into([again])
    assert {n: str(t.device) for n, t in again.memory.items()} == {"bank": "meta", "step": "cpu"}


def test_devices_are_noted_but_for_the_cpu() -> None:
    mixed = {"a": torch.ones(1), "b": torch.ones(1, device="meta")}
    assert checkpoint.devices_of(mixed) == {"b": "meta"}


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for tick in (0, 1, 2, 9, 10):
        checkpoint.save(tmp_path, tick, [Node("A")], {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "000009.safetensors",
        "000010.safetensors",
    ]
    point = checkpoint.latest(tmp_path)
    assert point is not None
    assert point.tick == 10


def stop_after(folder: Path, tick: int, method: Any = FEDLINKED) -> None:
    """A run on tiny nodes that ends, as if killed, once the checkpoint of `tick` is written."""
    save = checkpoint.save

    def dies(*args: Any) -> None:
        save(*args)
        if args[1] == tick:
            raise KeyboardInterrupt

    with patched("checkpoint.save", dies), pytest.raises(KeyboardInterrupt):
        pf.run(method, tiny(), folder=folder)


@pytest.mark.parametrize("tick", [0, 1, 2, 3])
def test_resume_equals_uninterrupted(tmp_path: Path, whole: Run, tick: int) -> None:
    stop_after(tmp_path / "run", tick)
    assert same(pf.resume(tmp_path / "run", nodes=tiny()), whole)
    assert figures(Run.open(tmp_path / "run")) == figures(whole)
    assert figures(pf.resume(tmp_path / "run")) == figures(whole)  # finished: only read


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda p: os.truncate(p, p.stat().st_size - 5),
    "cut in the header": lambda p: os.truncate(p, 20),
    "empty": lambda p: p.write_bytes(b""),
    "noise": lambda p: p.write_bytes(bytes(range(256))),
    "foreign": lambda p: save_file({"a": torch.ones(1)}, p),
    "folder": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path, whole: Run, damage: str) -> None:
    folder = tmp_path / "run"
    stop_after(folder, 2)
    newest = folder / "checkpoints" / "000002.safetensors"
    DAMAGES[damage](newest)
    with pytest.raises(RunError, match=r"000002.safetensors is damaged.*Remove it to go on") as got:
        pf.resume(folder, nodes=tiny())
    assert "\n" not in str(got.value)
    newest.rmdir() if newest.is_dir() else newest.unlink()
    assert same(pf.resume(folder, nodes=tiny()), whole)


def test_other_nodes_are_refused(tmp_path: Path) -> None:
    stop_after(tmp_path / "run", 1)
    others = tiny()
    others[1].name = "other"
    with pytest.raises(RunError, match="does not hold the network of node other"):
        pf.resume(tmp_path / "run", nodes=others)
    with pytest.raises(RunError, match=r"your own nodes: .* polyfed.resume\(folder, nodes=...\)"):
        pf.resume(tmp_path / "run")


# ---- a disk that is full -------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_atomically_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")

    def half(error: BaseException) -> Callable[[Path], None]:
        def write(temporary: Path) -> None:
            temporary.write_text("ne")
            raise error

        return write

    with pytest.raises(RunError, match=r"could not write .*result\.json: No space left on"):
        write_atomically(path, half(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half(KeyboardInterrupt()))
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["result.json"])


def check_after_full_disk(folder: Path, error: str) -> None:
    assert re.search(rf"could not write {folder}/\S+: .*make room.*polyfed resume {folder}", error)
    assert not list(folder.rglob("*.partial"))
    assert read_result(folder) is None


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_checkpoint_that_fails_half_way(tmp_path: Path, whole: Run, fails_at: int) -> None:
    folder, calls = tmp_path / "run", []

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == fails_at:
            path.write_bytes(b"half a checkpoint")
            full()
        save_file(tensors, path, metadata)

    with patched("checkpoint.save_file", half), pytest.raises(RunError) as caught:
        pf.run(FEDLINKED, tiny(), folder=folder)
    check_after_full_disk(folder, str(caught.value))
    point = checkpoint.latest(folder / "checkpoints")
    assert (point.tick if point else -1) == fails_at - 2
    assert same(pf.resume(folder, nodes=tiny()), whole)


@pytest.mark.parametrize("log", ["metrics", "ledger"])
def test_a_log_that_cannot_be_written(tmp_path: Path, whole: Run, log: str) -> None:
    folder, flush = tmp_path / "run", Log._flush

    def fails(self: Log) -> None:
        if self._path and self._path.stem == log and any(r["tick"] == 2 for r in self.records):
            full()
        flush(self)

    with patched("log.Log._flush", fails), pytest.raises(RunError) as caught:
        pf.run(FEDLINKED, tiny(), folder=folder)
    check_after_full_disk(folder, str(caught.value))
    assert same(pf.resume(folder, nodes=tiny()), whole)


def test_a_result_that_cannot_be_written(tmp_path: Path, whole: Run) -> None:
    folder = tmp_path / "run"
    write = patched("recorder.write_text", _only_not("result.json"))
    with write, pytest.raises(RunError, match=r"result\.json: No space"):
        pf.run(FEDLINKED, tiny(), folder=folder)
    assert same(pf.resume(folder, nodes=tiny()), whole)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_run_that_cannot_begin_can_begin_later(tmp_path: Path, whole: Run, name: str) -> None:
    folder = tmp_path / "run"
    write = patched("recorder.write_text", _only_not(name))
    with write, pytest.raises(RunError, match=f"{name}: No space"):
        pf.run(FEDLINKED, tiny(), folder=folder)
    begun = (folder / "config.yaml").exists()
    again = pf.resume(folder, nodes=tiny()) if begun else pf.run(FEDLINKED, tiny(), folder=folder)
    assert same(again, whole)
    assert (folder / "environment.json").exists()


def _only_not(name: str) -> Callable[[Path, str], None]:
    def write(path: Path, text: str) -> None:
        write_atomically(path, full if path.name == name else lambda p: p.write_text(text))

    return write


SCRIPT = """
import resource, sys
import polyfed as pf
from polyfed.testing.federations import tiny
folder, limit, method = sys.argv[1], int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
pf.run(eval(method, vars(pf) | {n: getattr(pf, n) for n in ("FedAvg", "FedLinked")}), tiny(),
       folder=folder)
"""


@pytest.mark.parametrize(
    ("method", "limit", "what"),
    [
        (FEDLINKED, 7_000, "checkpoints/000001.safetensors"),  # with the snapshots for rollback
        (FEDAVG, 14_000, "ledger.jsonl"),
        (FEDAVG, 100, "config.yaml"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_disk_that_is_really_full(tmp_path: Path, method: Any, limit: int, what: str) -> None:
    folder = tmp_path / "run"
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(limit), repr(method)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(
        rf"polyfed.errors.RunError: could not write {folder}/{what}: .*File too lar", last
    )
    assert not list(folder.rglob("*.partial"))
    if what == "config.yaml":
        again = pf.run(method, tiny(), folder=folder)
    else:
        check_after_full_disk(folder, last)
        again = pf.resume(folder, nodes=tiny())
    assert same(again, pf.run(method, tiny()))


def test_a_small_file_system_that_fills_up(tmp_path: Path, whole: Run) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        (disk / "other").write_bytes(b"x" * 32_000)
        with pytest.raises(RunError, match="No space left") as caught:
            pf.run(FEDLINKED, tiny(), folder=disk / "run")
        check_after_full_disk(disk / "run", str(caught.value))
        (disk / "other").unlink()
        with pytest.warns(UserWarning, match="no report: .*No space left"):  # it is larger
            assert same(pf.resume(disk / "run", nodes=tiny()), whole)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- what is not a run, or not ours --------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("format: 2\nmethod: fedavg\n", "run-folder format 2, this polyfed reads 1.*environment"),
        ("method: fedavg\n", "run-folder format None"),
        ("just text", "run-folder format None"),
        ("a: [", "config.yaml is not YAML"),
        (b"\xff\xfe\x00", "config.yaml is not YAML"),
        ("format: 1\nmethods: {}\n", "holds a comparison, not a single run"),
        (None, "is not a run folder: it has no config.yaml"),
    ],
)
@pytest.mark.parametrize("call", [pf.resume, Run.open])
def test_folders_that_cannot_be_read(
    tmp_path: Path, call: Callable[[Path], Run], config: str | bytes | None, text: str
) -> None:
    if config is not None:
        raw = config if isinstance(config, bytes) else config.encode()
        (tmp_path / "config.yaml").write_bytes(raw)
    (tmp_path / "metrics.jsonl").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(RunError, match=text):
        call(tmp_path)
    assert contents(tmp_path) == before


def test_a_damaged_result_says_what_to_do(tmp_path: Path, whole: Run) -> None:
    pf.run(FEDLINKED, tiny(), folder=tmp_path)
    (tmp_path / "result.json").write_text('{"accu')
    with pytest.raises(RunError, match=r"result.json is damaged.*Remove it"):
        pf.resume(tmp_path, nodes=tiny())
    (tmp_path / "result.json").unlink()
    assert same(pf.resume(tmp_path, nodes=tiny()), whole)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"exists and is not empty.*polyfed resume"):
        pf.run(FEDAVG, tiny(), folder=tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    for below in ("", "below"):
        with pytest.raises(RunError, match="could not make"):
            pf.run(FEDAVG, tiny(), folder=tmp_path / "thesis.tex" / below)


def test_two_writers_on_one_folder(tmp_path: Path) -> None:
    stop_after(tmp_path / "run", 1)
    before = contents(tmp_path)
    recorder, point = Recorder.reopen(tmp_path / "run")
    assert point is not None
    code = (
        "import sys, polyfed as pf; from polyfed.testing.federations import tiny\n"
        "pf.resume(sys.argv[1], nodes=tiny())"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "run")]
    other = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert other.stderr.strip().endswith("by another process: it has been started already.")
    with pytest.raises(RunError, match="being written by another process"):
        Recorder.reopen(tmp_path / "run")
    assert contents(tmp_path) == before
    recorder.close()
    assert pf.resume(tmp_path / "run", nodes=tiny()).accuracy


def test_two_processes_that_begin_at_once(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "config.yaml.partial").touch()  # a process was killed at once: not in the way
    recorder = Recorder.create(tmp_path, {})
    (tmp_path / "config.yaml").unlink()  # the other one has not come so far
    for log in ("metrics", "ledger", "faults"):
        (tmp_path / f"{log}.jsonl").unlink()
    (tmp_path / "environment.json").unlink()
    with pytest.raises(RunError, match="being written by another process"):
        Recorder.create(tmp_path, {})
    recorder.close()


@pytest.mark.parametrize("tick", [1, FEDAVG.rounds])
def test_a_folder_that_goes_away_is_told_and_not_made_anew(tmp_path: Path, tick: int) -> None:
    folder, save, saved = tmp_path / "run", checkpoint.save, list[int]()

    def removed(*args: Any) -> None:
        save(*args)
        saved.append(args[1])
        if args[1] == tick:
            shutil.rmtree(folder)

    told = pytest.raises(RunError, match=f"{folder} is gone.*Begin it again")
    with patched("checkpoint.save", removed), told:
        pf.run(FEDAVG, tiny(), folder=folder)
    assert saved[-1] == tick
    assert not folder.exists()


# ---- enough to run it again ----------------------------------------------------------------------


def test_environment_names_versions(tmp_path: Path) -> None:
    pf.run(pf.FedAvg(rounds=0), tiny(), folder=tmp_path)
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["polyfed"] == pf.__version__
    assert found["torch"] == torch.__version__
    assert found.keys() >= {"python", "numpy", "platform", "threads"}


def test_config_is_enough_to_run_it_again(tmp_path: Path) -> None:
    task = tasks.digits(labels=4, heads="own", init="own")
    method = pf.FedLinked(rounds=2, batch=0.5, lr=3e-3, eta=1.5, init_epochs=1, distil_epochs=1,
                          finetune_epochs=1, local_epochs=2, strength=True, secret_rotation=True,
                          optimiser="sgd", momentum=0.5)  # fmt: skip
    first = pf.run(
        method, task, seed=3, evaluate_every=2, absent={2: ["M1"]}, folder=tmp_path / "a"
    )
    config = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert config == read_config(tmp_path / "a")
    settings = dict(config["settings"])
    again = pf.run(
        options.build(methods.load(config["method"]), config["options"], "method"),
        tasks.make(config["task"], config["task_options"]),
        topology=config["topology"],
        folder=tmp_path / "b",
        **settings,
    )
    assert same(again, first)
    assert (tmp_path / "b" / "config.yaml").read_bytes() == (
        tmp_path / "a" / "config.yaml"
    ).read_bytes()
    assert figures(Run.open(tmp_path / "b")) == figures(first)
    assert first.faults == [{"tick": 2, "node": "M1", "fault": "absent"}]
