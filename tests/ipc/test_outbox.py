"""The outbox bounds its bytes, wakes its reader, and may be closed more than once."""

import select

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepsight.ipc.outbox import Outbox

MAX_BYTES = 100


class OutboxMachine(RuleBasedStateMachine):
    """Compares the outbox with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox[int](MAX_BYTES)
        self.waiting: list[tuple[int, int]] = []
        self.num_put = 0
        self.is_awake = False

    @rule(num_bytes=st.integers(0, 2 * MAX_BYTES))
    def put(self, num_bytes: int) -> None:
        fits = not self.waiting or sum(size for _, size in self.waiting) + num_bytes <= MAX_BYTES
        assert self.outbox.try_put(self.num_put, num_bytes) == (fits and not self.outbox.is_closed)
        if fits and not self.outbox.is_closed:
            self.waiting.append((self.num_put, num_bytes))
            self.is_awake = True
        self.num_put += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def send_first(self) -> None:
        assert self.outbox.first() == self.waiting.pop(0)[0]
        self.outbox.remove_first()

    @precondition(lambda self: self.is_awake)
    @rule()
    def note_awake(self) -> None:
        self.outbox.note_awake()
        self.is_awake = False

    @precondition(lambda self: not self.outbox.is_closed)
    @rule()
    def close(self) -> None:
        self.outbox.close()
        self.outbox.close()
        self.is_awake = True

    @invariant()
    def agrees_with_model(self) -> None:
        assert self.outbox.is_empty == (not self.waiting)
        assert bool(select.select([self.outbox.fd], [], [], 0)[0]) == self.is_awake
        self.outbox.check_invariants()

    def teardown(self) -> None:
        self.outbox.free()
        self.outbox.free()
        self.outbox.check_invariants()
        assert not self.outbox.try_put(0, 0)


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(max_examples=30, stateful_step_count=30)
