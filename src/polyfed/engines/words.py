"""What a party says to who started it: where it stands, for whom it waits, why it ended early."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.node import Name
from polyfed.engines.party import Party
from polyfed.errors import ConfigError, PolyfedError, RunError


def standing(party: Party) -> str:
    """Where it stands, and for whom it waits."""
    held, last = party.council.accepted, party.charter.method.rounds
    awaited = party.council.awaited()
    waiting = f"waiting for {_who(party, awaited)}, {party.charter.patience:g} s at most (patience)"
    if held is None:
        return waiting if awaited else "all are here"
    if held.round > last:
        return "the end"
    round_ = f"round {held.round} of {last} with {', '.join(held.members)}"
    return f"{round_}; {waiting}" if awaited else round_


def failure(party: Party) -> PolyfedError | None:
    """Why a party that is over has not come to the end, and what to do; None if it has."""
    me = party.name
    if party.refused is not None:
        return ConfigError(
            f"{me} has another federation file than {party.refused}, who leads the run: "
            f"{party.strangers[party.refused]}. Give all sites the same file, then type the same "
            "command again."
        )
    if party.lost:
        return RunError(
            f"{me} has played round {party.lost}, as the others know, and its folder does not hold "
            "what came of it. Put the folder back that the site had; to begin the run anew, write "
            "another `folder` in the site file, at all sites."
        )
    if party.accuracy is not None:
        return None
    done, folder = party.states.last, party.recorder.folder
    waited = f"{party.charter.patience:g} s (patience) for {_who(party, party.missed)}"
    show = (
        f" If they have finished without it, this is what {me} keeps: polyfed show {folder}"
        if done and folder
        else ""
    )
    return RunError(
        f"{me} is left alone after {done} of {party.charter.method.rounds} rounds: it has waited "
        f"{waited if party.missed else 'too long, with all the others there'}. Nothing is lost: "
        "the same command goes on from here. Start the others too, each with its own site file; "
        "if they run already, see whether `connect` leads to one of them and whether their "
        f"federation files name the same `run`.{show}"
    )


def _who(party: Party, names: Sequence[Name]) -> str:
    why = {name: f" (another federation file: {said})" for name, said in party.strangers.items()}
    return ", ".join(f"{name}{why.get(name, '')}" for name in names)
