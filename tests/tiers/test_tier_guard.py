"""A failing tier is paused, each time for longer, and is used again after its pause."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from keepsight.errors import TierError
from keepsight.tiers.tier_guard import GuardLimits, TierGuard
from tests.clock import Clock
from tests.scheduling.long_run import thorough

LIMITS = GuardLimits(slow_seconds=0.5, stuck_seconds=10, first_pause=1, longest_pause=8)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def guard(clock: Clock) -> TierGuard:
    return TierGuard("disk tier", LIMITS, clock)


def operate(guard: TierGuard, clock: Clock, seconds: float = 0.0, error: Exception | None = None) -> bool:
    with guard.watch() as may:
        clock.now += seconds if may else 0
        if may and error is not None:
            raise error
    return may


def expect_pause(guard: TierGuard, clock: Clock, seconds: float) -> None:
    clock.now += seconds - 0.01
    assert not guard.is_usable
    clock.now += 0.01
    assert guard.is_usable


@pytest.mark.parametrize("error", [OSError(28, "full"), TierError("nonsense"), TimeoutError("slow")])
def test_a_failure_pauses_the_tier_with_a_reason_and_is_not_raised(
    guard: TierGuard, clock: Clock, error: Exception
) -> None:
    assert guard.why_unused() is None
    assert operate(guard, clock, error=error)
    assert type(error).__name__ in (guard.why_unused() or "")
    assert not operate(guard, clock)


def test_the_tier_recovers_after_pauses_that_double(guard: TierGuard, clock: Clock) -> None:
    for pause in (1, 2, 4, 8, 8):
        assert operate(guard, clock, error=OSError())
        expect_pause(guard, clock, pause)
    assert operate(guard, clock)
    assert guard.why_unused() is None


def test_a_tier_that_stays_unusable_is_logged_only_while_its_pauses_grow(
    guard: TierGuard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        assert operate(guard, clock, error=OSError("down"))
        clock.now += 8
    messages = [f"the disk tier is set aside for {pause} s: OSError: down" for pause in (1, 2, 4, 8)]
    assert caplog.messages == messages
    assert operate(guard, clock)
    assert operate(guard, clock, error=OSError("down"))
    assert caplog.messages == [*messages, "the disk tier is used again", messages[-1]]


def test_many_successes_reset_the_pause(guard: TierGuard, clock: Clock) -> None:
    operate(guard, clock, error=OSError())
    clock.now += 1
    for _ in range(100):
        assert operate(guard, clock)
    operate(guard, clock, error=OSError())
    expect_pause(guard, clock, 1)


@pytest.mark.parametrize("error", [None, OSError("the same")])
def test_operations_begun_before_the_pause_neither_end_nor_prolong_it(
    guard: TierGuard, clock: Clock, error: Exception | None
) -> None:
    with guard.watch():
        operate(guard, clock, error=OSError())
        if error is not None:
            raise error
    expect_pause(guard, clock, 1)


def test_after_a_pause_only_the_trial_operation_decides(guard: TierGuard, clock: Clock) -> None:
    with guard.watch():
        operate(guard, clock, error=OSError())
        clock.now += 1
        trial = guard.watch()
        assert trial.__enter__()
    assert not guard.is_usable
    trial.__exit__(None, None, None)
    assert guard.why_unused() is None


def test_after_a_pause_one_operation_runs_at_a_time(guard: TierGuard, clock: Clock) -> None:
    operate(guard, clock, error=OSError())
    clock.now += 1
    with guard.watch() as first, guard.watch() as second:
        assert first
        assert not second
    assert operate(guard, clock)


def test_after_a_pause_no_operation_that_would_prove_nothing_is_begun(guard: TierGuard, clock: Clock) -> None:
    operate(guard, clock, error=OSError())
    clock.now += 1
    with guard.watch(may_try=False) as may:
        assert not may
    assert guard.why_unused() == "OSError: "
    assert operate(guard, clock)
    with guard.watch(may_try=False) as may:
        assert may


def test_the_tier_is_paused_if_one_in_ten_operations_is_slow(guard: TierGuard, clock: Clock) -> None:
    for number in range(200):
        assert operate(guard, clock, 0.6 if number % 32 == 31 else 0.01)
    assert guard.why_unused() is None
    for number in range(64):
        operate(guard, clock, 0.6 if number % 10 == 0 else 0.01)
    assert "slow" in (guard.why_unused() or "")


def test_a_hanging_operation_pauses_the_tier_until_it_returns(guard: TierGuard, clock: Clock) -> None:
    with guard.watch():
        clock.now += 11
        assert not guard.is_usable
        assert guard.why_unused() == "an operation does not return"
        assert not operate(guard, clock)
    assert guard.is_usable


def test_programming_errors_are_raised_and_count_as_failures(guard: TierGuard, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError):
        operate(guard, clock, error=ZeroDivisionError())
    assert not guard.is_usable


def test_invariants_hold_under_any_order_of_events() -> None:
    run_state_machine_as_test(_Events, settings=thorough(30))


class _Events(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(0.0)
        self.guard = TierGuard("disk tier", LIMITS, self.clock)

    @rule(seconds=st.sampled_from([0.0, 0.75, 5.0]), fails=st.booleans())
    def operate(self, seconds: float, fails: bool) -> None:
        was_usable = self.guard.is_usable
        assert operate(self.guard, self.clock, seconds, OSError() if fails else None) == was_usable
        if was_usable and fails:
            assert not self.guard.is_usable

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def holds(self) -> None:
        self.guard.check_invariants()
        assert self.guard.is_usable or self.guard.why_unused()
