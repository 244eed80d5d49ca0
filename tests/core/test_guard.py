from __future__ import annotations

import pytest

import polyfed as pf
from polyfed.core.guard import Guard
from polyfed.errors import ConfigError


def test_what_can_be_typed() -> None:
    assert Guard.parse(None) == Guard.parse("") == Guard()
    assert Guard.parse("clip=1,noise=0.5") == Guard(clip=1.0, noise=0.5)
    assert Guard.parse(" clip = 1 ; noise=0.5;delta=1e-6") == Guard(clip=1, noise=0.5, delta=1e-6)
    assert Guard.parse("compress=int8") == Guard(compress="int8")
    assert Guard.parse("secure") == Guard.parse("secure=yes") == Guard(secure=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("noise=1", "without a bound no noise is enough"),
        ("clip=-1", "clip must be >= 0"),
        ("clip=1,noise=-1", "noise must be >= 0"),
        ("clip=nan", "clip must be >= 0"),
        ("delta=0", "delta must be > 0"),
        ("delta=1", "delta must be between"),
        ("compress=int4", "compress: 'int4' does not fit"),
        ("compress=int8,secure", "do not go together"),
        ("clipp=1", "unknown option of guard 'clipp'. Did you mean 'clip'"),
        ("clip", "clip: 'true' does not fit"),
    ],
)
def test_what_cannot(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        pf.FedAvg(guard=text)
