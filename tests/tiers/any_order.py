"""Runs a Hypothesis state machine that a function creates."""

from collections.abc import Callable

from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.scheduling.long_run import thorough


def check_any_order(make: Callable[[], RuleBasedStateMachine], *effort: int) -> None:
    # It is declared to take a class, but only calls it.
    run_state_machine_as_test(make, settings=thorough(*effort))  # type: ignore[arg-type]
