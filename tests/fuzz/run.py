"""Give the fuzz targets of this folder many inputs: `make fuzz`.

    python tests/fuzz/run.py [--inputs 1000000] [--seed 0] [TARGET ...]

Each target runs in a process of its own. With atheris (`pip install atheris`) coverage guides the
mutations; without it, or with --plain, they are drawn from the seed. A target fails when it raises
anything, or when the process has grown by more than 64 MB since the first fifth of its inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Of 100 inputs, how many each target gets.
SHARES = {
    "frame": 16, "parcel": 10, "header": 16, "message": 16, "note": 14, "channel": 10, "facts": 4,
    "checkpoint": 4, "notes": 6, "garbled": 4,
}  # fmt: skip
GROWTH = 64  # MB
WORD = re.compile(rb'-?\d+(?:\.\d+)?|"[^"]*"|null|true|false|\[\]|\{\}')  # of JSON
Target = Callable[[bytes], int | None]  # it may tell how many inputs it made of one


def main() -> None:
    """Run all targets, one after the other, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--one", action="store_true", help="this process runs the target")
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[[], *SHARES])
    given = parser.parse_args()
    if given.one:
        (name,) = given.targets
        run(name, given.inputs, given.seed, plain=given.plain)
        return
    for name in given.targets or SHARES:
        inputs = given.inputs if given.targets else given.inputs * SHARES[name] // 100
        command = [sys.executable, __file__, "--one", name, "--inputs", str(inputs)]
        command += ["--seed", str(given.seed), *(["--plain"] if given.plain else [])]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(command, check=True, env={**os.environ, "TMPDIR": folder})


def run(name: str, inputs: int, seed: int, *, plain: bool) -> None:
    """Run one target in this process."""
    atheris = None if plain or name == "garbled" else find_atheris()
    instrumented = (
        contextlib.nullcontext()
        if atheris is None
        else atheris.instrument_imports(
            include=["polyfed.engines", "polyfed.core.message", "polyfed.record", "json"]
        )
    )
    with instrumented:
        target, samples, tokens = load(name)
    import torch

    torch.set_num_threads(1)
    mutate = Mutator(tokens, seed)
    counted = Counted(name, target, inputs, "seeded" if atheris is None else "atheris")
    if atheris is None:
        while counted.count < inputs:
            counted(mutate(samples[mutate.below(len(samples))]))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for i, raw in enumerate(samples):
            (corpus / str(i)).write_bytes(raw)

        def either(raw: bytes, size: int, _: int) -> bytes:
            return bytes(atheris.Mutate(raw, size) if mutate.below(2) else mutate(raw)[:size])

        flags = [f"-runs={2 * inputs}", f"-seed={seed + 1}", "-max_len=6000", "-verbosity=0"]
        flags += ["-rss_limit_mb=4096", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], str(corpus), *flags], counted, custom_mutator=either)
        atheris.Fuzz()


def find_atheris() -> Any:
    """The fuzzer, if it is installed."""
    try:
        import atheris  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return atheris


def load(name: str) -> tuple[Target, list[bytes], tuple[bytes, ...]]:
    """A target, genuine inputs of it, and words to mutate them with."""
    found = {}
    for path in sorted(HERE.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        found[path.stem] = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = found[path.stem]
        spec.loader.exec_module(found[path.stem])
    for module in found.values():
        if name in module.TARGETS:
            return module.TARGETS[name], module.genuine()[name], found["test_decoder"].TOKENS
    raise SystemExit(f"no target {name}")


class Counted:
    """A target that counts its inputs, watches the memory and says how it went."""

    def __init__(self, name: str, target: Target, inputs: int, how: str) -> None:
        self.name, self.target, self.inputs, self.how = name, target, inputs, how
        self.count, self.first, self.begun = 0, 0.0, time.perf_counter()

    def __call__(self, raw: bytes) -> None:
        """One input."""
        if self.count >= self.inputs:
            sys.stdout.flush()
            os._exit(0)  # atheris runs until its process ends
        try:
            self.count += self.target(raw) or 1
        except BaseException:
            print(f"{self.name}: input {self.count}: {raw!r}", flush=True)
            raise
        if not self.first and self.count >= self.inputs // 5:
            self.first = resident()
        if self.count >= self.inputs:
            grown = resident() - self.first
            spent = time.perf_counter() - self.begun
            print(
                f"{self.name}: {self.count} inputs ({self.how}) in {spent:.0f} s, "
                f"{self.first:.0f} MB and {grown:+.1f} MB later",
                flush=True,
            )
            if grown > GROWTH:
                raise MemoryError(f"{self.name} has grown by {grown:.0f} MB")


def resident() -> float:
    """MB of memory that this process has."""
    import gc

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Mutator:
    """Changes bytes in a few places, drawn from a seed."""

    def __init__(self, tokens: tuple[bytes, ...], seed: int) -> None:
        from polyfed.engines.simulated import Chance

        self._tokens, self._chance = tokens, Chance(seed)

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return int(self._chance() * n)

    def __call__(self, given: bytes) -> bytes:
        """The same bytes with one to four changes."""
        raw = bytearray(given)
        for _ in range(1 + self.below(4)):
            self._change(raw)
        return bytes(raw)

    def _change(self, raw: bytearray) -> None:
        start, kind = self.below(len(raw) + 1), self.below(8)
        token = self._tokens[self.below(len(self._tokens))]
        words = list(WORD.finditer(raw)) if kind < 3 else []
        if words:
            word = words[self.below(len(words))]
            other = words[self.below(len(words))][0]
            raw[word.start() : word.end()] = token if kind else other
        elif kind < 4:
            raw[start : start + self.below(9)] = token
        elif kind == 4 and raw:
            raw[start % len(raw)] ^= 1 << self.below(8)
        elif kind == 5:
            del raw[start : start + 1 + self.below(16)]
        elif kind == 6:
            raw[start:start] = raw[self.below(len(raw) + 1) :][: self.below(64)]
        else:
            raw[start : start + 4] = bytes(self.below(256) for _ in range(4))


if __name__ == "__main__":
    main()
