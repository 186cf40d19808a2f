"""Who owns which slot of recurrent states, and which copies that takes."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepsight.scheduling.state_slots import StateSlots
from keepsight.scheduling.step_plan import SequenceId, StateCopy
from tests.scheduling.long_run import thorough

A, B, C = ("a", 0), ("b", 0), ("c", 0)


def test_a_slot_belongs_to_a_sequence_until_it_is_released() -> None:
    slots = StateSlots(2)
    assert slots.try_begin(A, None)
    assert slots.try_begin(B, None)
    assert not slots.try_begin(C, None)
    slots.release(A)
    assert slots.try_begin(C, None)
    assert slots.slot_of(A) is None
    assert {slots.slot_of(B), slots.slot_of(C)} == {0, 1}
    assert slots.take_copies() == []


def test_the_least_recently_used_kept_state_is_evicted_before_a_sequence_is_refused() -> None:
    slots = StateSlots(4)
    slots.try_begin(A, None)
    for name in (b"one", b"two", b"three"):
        slots.keep(A, name)
    slots.try_begin(B, b"one")
    assert slots.num_evicted == 1
    assert [slots.count_usable([name]) for name in (b"one", b"two", b"three")] == [1, 0, 1]


def test_nothing_is_kept_where_all_slots_are_live() -> None:
    slots = StateSlots(1)
    slots.try_begin(A, None)
    slots.keep(A, b"one")
    assert slots.num_kept == 0
    assert slots.take_copies() == []


def test_a_state_is_kept_once_and_then_counts_as_used() -> None:
    slots = StateSlots(4)
    slots.try_begin(A, None)
    for name in (b"one", b"two", b"one", b"three", b"four"):
        slots.keep(A, name)
    assert [slots.count_usable([name]) for name in (b"one", b"two")] == [1, 0]


def test_the_last_slot_passes_from_a_kept_state_to_the_sequence_that_begins_there() -> None:
    slots = StateSlots(2)
    slots.try_begin(A, None)
    slots.keep(A, b"one")
    slots.take_copies()
    assert slots.try_begin(B, b"one")
    assert slots.take_copies() == []
    assert slots.num_kept == 0
    slots.check_invariants()


def test_copies_are_in_order_if_a_slot_is_released_and_taken_again_before_they_are_made() -> None:
    slots = StateSlots(2)
    slots.try_begin(A, None)
    live = slots.slot_of(A)
    assert live is not None
    slots.keep(A, b"one")
    slots.release(A)
    slots.try_begin(B, b"one")
    assert slots.slot_of(B) == live
    assert slots.take_copies() == [StateCopy(live, 1 - live), StateCopy(1 - live, live)]


class SlotsMachine(RuleBasedStateMachine):
    """Each state is a text: what the slots hold after all copies is compared with what was kept or begun."""

    @initialize(num_slots=st.integers(1, 5))
    def begin(self, num_slots: int) -> None:
        self.slots = StateSlots(num_slots)
        self.held = [""] * num_slots
        self.live: dict[SequenceId, str] = {}
        self.num_steps = 0

    def run(self) -> None:
        """Make the copies, then let each sequence's state advance."""
        for source, target in self.slots.take_copies():
            self.held[target] = self.held[source]
        for sequence_id, text in self.live.items():
            slot = self.slots.slot_of(sequence_id)
            assert slot is not None
            assert not text or self.held[slot] == text
            self.num_steps += 1
            self.live[sequence_id] = self.held[slot] = f"{text}{self.num_steps} "

    @rule()
    def step(self) -> None:
        self.run()

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sequence_id = (str(data.draw(st.integers(0, 9))), 0)
        name = data.draw(st.sampled_from([None, *sorted(self.slots._kept)]))
        if sequence_id not in self.live:
            has_room = len(self.live) < self.slots.num_slots
            assert self.slots.try_begin(sequence_id, name) == has_room
            if has_room:
                self.live[sequence_id] = "" if name is None else name.decode()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """States are named by what they are of, so the same name always means the same state."""
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        if text := self.live[sequence_id]:
            self.slots.keep(sequence_id, text.encode())
            assert self.slots.count_usable([text.encode()]) == (len(self.live) < self.slots.num_slots)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[sequence_id]
        self.slots.release(sequence_id)

    @rule()
    def forget(self) -> None:
        self.slots.forget()
        assert self.slots.num_kept == 0

    @rule(data=st.data(), until=st.floats(1, 10))
    def pin(self, data: st.DataObject, until: float) -> None:
        if kept := sorted(self.slots._kept):
            self.slots.pin(data.draw(st.sampled_from(kept)), until)

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check_invariants()


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = thorough(50, num_steps=40)
