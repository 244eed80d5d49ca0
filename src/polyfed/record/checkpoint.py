"""Checkpoints: the whole state of a run after a tick, as one safetensors file.

Random streams are named, so no generator state is needed; phases never cross a tick, so no
optimiser state is either. Models, memories and the lengths of the logs are all there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polyfed.core.node import Node
from polyfed.errors import RunError
from polyfed.record.files import write_atomically

KEPT = 2
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: after `tick`, with logs of these lengths."""

    tick: int
    lengths: Mapping[str, int]
    path: Path

    def load_into(self, nodes: Iterable[Node]) -> None:
        """Put models and memories back as they were, memories where they were."""
        with safe_open(self.path, framework="pt") as stored:
            names = list(stored.keys())
            devices = json.loads((stored.metadata() or {}).get("devices", "{}"))
            for node in nodes:

                def group(kind: str, node: Node = node) -> dict[str, Tensor]:
                    start = f"{node.name}/{kind}/"
                    return {
                        n[len(start) :]: stored.get_tensor(n).to(devices.get(n, "cpu"))
                        for n in names
                        if n.startswith(start)
                    }

                state = group("model")
                if state.keys() != set(node.model.names()):
                    raise RunError(
                        f"{self.path} does not hold the network of node {node.name}. Continue "
                        "with the nodes the run was begun with."
                    )
                node.model.load(state)
                node.memory = group("memory")


def save(
    folder: Path,
    tick: int,
    nodes: Iterable[Node],
    lengths: Mapping[str, int],
    kept: int = KEPT,
    label: str = "",
) -> None:
    """Write the checkpoint of a tick, then drop all but the newest `kept`; with 0, drop none."""
    tensors: dict[str, Tensor] = {}
    for node in nodes:
        tensors |= {f"{node.name}/model/{n}": t for n, t in node.model.state().items()}
        tensors |= {f"{node.name}/memory/{n}": t.clone() for n, t in node.memory.items()}
    path = folder / f"{tick:06d}{label}{_SUFFIX}"
    metadata = {"tick": str(tick), "lengths": json.dumps(dict(lengths))}
    metadata["devices"] = json.dumps(devices_of(tensors))
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}

    def write(temporary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    try:
        write_atomically(path, write)
    except RunError as error:
        raise RunError(
            f"{error} The run stands at its last checkpoint, nothing is lost: make room, "
            f"then `polyfed resume {folder.parent}`."
        ) from error
    for old in _files(folder)[:-kept] if kept else ():
        old.unlink()


def devices_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Where tensors are that are not on the CPU."""
    return {name: str(t.device) for name, t in tensors.items() if t.device.type != "cpu"}


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, if there is one."""
    files = _files(folder)
    if not files:
        return None
    try:
        with safe_open(files[-1], framework="pt") as stored:
            metadata = stored.metadata() or {}
        return Checkpoint(int(metadata["tick"]), json.loads(metadata["lengths"]), files[-1])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(
            f"{files[-1]} is damaged: {error}. Remove it to go on from the one before."
        ) from error


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))
