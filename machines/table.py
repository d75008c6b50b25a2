"""Transition tables: what a machine may do, as data.

Owns the look-up of a move and the error for one that the table lacks. Does not own any machine. Surprising rule: the
look-up goes by the exact class of the event, so a subclass of an event is another event.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias, TypeVar


class State(Enum):
    """What the states of a machine are: members without order."""

    __hash__ = object.__hash__  # Tables are looked up for every lane of a frame, and Enum hashes by name, in Python.


S = TypeVar("S", bound=State)

Transitions: TypeAlias = Mapping[tuple[S, type], S]
"""`{(state, event class): next state}`; what is not in it is illegal."""


class IllegalTransition(RuntimeError):
    """A machine was given an event that its state has no move for: a fault of ours, never of a client."""

    def __init__(self, machine: str, state: State, event: object) -> None:
        super().__init__(f"{machine}: no transition from {state.value} on {type(event).__name__}")


def next_state(machine: str, table: Transitions[S], state: S, event: object) -> S:
    """The state that `event` leads to. Raises `IllegalTransition` and changes nothing if the table lacks the move."""
    after = table.get((state, type(event)))
    if after is None:
        raise IllegalTransition(machine, state, event)
    return after
