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
        """Put models and memories back as they were."""
        with safe_open(self.path, framework="pt") as stored:
            names = list(stored.keys())
            for node in nodes:
                device = next((t.device for t in node.model.net.state_dict().values()), None)

                def group(kind: str, node: Node = node) -> dict[str, Tensor]:
                    start = f"{node.name}/{kind}/"
                    return {
                        n[len(start) :]: stored.get_tensor(n) for n in names if n.startswith(start)
                    }

                state = group("model")
                if state.keys() != set(node.model.names()):
                    raise RunError(
                        f"{self.path} does not hold the network of node {node.name}. Continue "
                        "with the nodes the run was begun with."
                    )
                node.model.load(state)
                memory = group("memory")
                node.memory = {n: t if device is None else t.to(device) for n, t in memory.items()}


def save(folder: Path, tick: int, nodes: Iterable[Node], lengths: Mapping[str, int]) -> None:
    """Write the checkpoint of a tick, then drop all but the newest few."""
    tensors: dict[str, Tensor] = {}
    for node in nodes:
        tensors |= {f"{node.name}/model/{n}": t for n, t in node.model.state().items()}
        tensors |= {f"{node.name}/memory/{n}": t.clone() for n, t in node.memory.items()}
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {"tick": str(tick), "lengths": json.dumps(dict(lengths))}

    def write(path: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    try:
        write_atomically(folder / f"{tick:06d}{_SUFFIX}", write)
    except RunError as error:
        raise RunError(
            f"{error} The run stands at its last checkpoint, nothing is lost: make room, "
            f"then `polyfed resume {folder.parent}`."
        ) from error
    for old in _files(folder)[:-KEPT]:
        old.unlink()


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
