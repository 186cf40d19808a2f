"""Who owns which slot of recurrent states, and which copies that takes."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepsight.scheduling.state_slots import StateSlots
from keepsight.scheduling.step_plan import SequenceId
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


def keep(slots: StateSlots, sequence_id: SequenceId, block_hash: bytes) -> None:
    slots.promise(sequence_id, block_hash)
    slots.keep(sequence_id, block_hash)


def test_the_least_recently_used_kept_state_is_evicted_before_a_sequence_is_refused() -> None:
    slots = StateSlots(4)
    slots.try_begin(A, None)
    for name in (b"one", b"two", b"three"):
        keep(slots, A, name)
    slots.try_begin(B, b"one")
    assert slots.num_evicted == 1
    assert [slots.count_usable([name]) for name in (b"one", b"two", b"three")] == [1, 0, 1]


def test_a_promised_slot_is_nobody_else_s_until_its_state_is_kept() -> None:
    slots = StateSlots(2)
    slots.try_begin(A, None)
    promised = slots.promise(A, b"one")
    assert promised is not None
    assert not slots.try_begin(B, None)
    assert slots.count_usable([b"one"]) == 0
    assert slots.will_have(A, b"one")
    assert not slots.will_have(B, b"one")
    slots.keep(A, b"one")
    assert slots.will_have(B, b"one")
    assert slots.count_usable([b"one"]) == 1
    assert slots.try_begin(B, None)
    assert slots.slot_of(B) == promised


def test_sequences_leave_the_reserved_slots_to_states_that_are_kept() -> None:
    slots = StateSlots(4, num_reserved=2)
    slots.try_begin(A, None)
    slots.promise(A, b"one")
    slots.keep(A, b"one")
    assert slots.try_begin(B, b"one")
    assert not slots.try_begin(C, b"one")
    assert slots.count_usable([b"one"]) == 1


def test_a_promise_may_take_a_reserved_slot_however_many_sequences_wait() -> None:
    slots = StateSlots(4, num_reserved=2)
    slots.try_begin(A, None)
    slots.try_begin(B, None)
    assert slots.promise(A, b"one", num_left=100) is not None
    assert slots.promise(B, b"two", num_left=100) is not None
    assert slots.promise(B, b"three", num_left=100) is None


@pytest.mark.parametrize(("num_kept", "num_evicted"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_promises_evict_half_of_the_kept_states_rounded_up(num_kept: int, num_evicted: int) -> None:
    slots, names = StateSlots(num_kept + 2, num_reserved=num_kept), [bytes([number]) for number in range(num_kept)]
    slots.try_begin(A, None)
    for name in names:
        slots.promise(A, name)
        slots.keep(A, name)
    slots.try_begin(B, names[0])
    promised = [slots.promise(B, b"another %d" % number) for number in range(num_kept)]
    assert num_kept - promised.count(None) == num_evicted
    by_use = [*names[1:], names[0]]
    assert [name for name in by_use if slots.count_usable([name])] == by_use[num_evicted:]


def test_a_promise_leaves_slots_to_sequences_that_may_begin() -> None:
    slots = StateSlots(3)
    slots.try_begin(A, None)
    assert slots.promise(A, b"one", num_left=2) is None
    assert slots.promise(A, b"one", num_left=1) is not None
    assert slots.promise(A, b"two", num_left=1) is None
    assert slots.try_begin(B, None)


def test_promised_slots_are_released_with_their_sequence() -> None:
    slots = StateSlots(3)
    slots.try_begin(A, None)
    slots.promise(A, b"one")
    slots.release(A)
    assert not slots.will_have(A, b"one")
    assert [slots.try_begin(each, None) for each in (A, B, C)] == [True] * 3


def test_of_two_sequences_that_promise_the_same_state_one_keeps_it() -> None:
    slots = StateSlots(4)
    for each in (A, B):
        slots.try_begin(each, None)
        assert slots.promise(each, b"one") is not None
    slots.keep(A, b"one")
    slots.keep(B, b"one")
    assert slots.num_kept == 1
    assert slots.try_begin(C, None)
    assert slots.num_evicted == 0


def test_nothing_is_kept_where_all_slots_are_live() -> None:
    slots = StateSlots(1)
    slots.try_begin(A, None)
    assert slots.promise(A, b"one") is None
    slots.keep(A, b"one")
    assert slots.num_kept == 0


def test_a_kept_state_is_not_promised_again_but_counts_as_used() -> None:
    slots = StateSlots(4)
    slots.try_begin(A, None)
    keep(slots, A, b"one")
    keep(slots, A, b"two")
    assert slots.promise(A, b"one") is None
    keep(slots, A, b"three")
    keep(slots, A, b"four")
    assert [slots.count_usable([name]) for name in (b"one", b"two")] == [1, 0]


def test_a_state_that_another_sequence_kept_first_counts_as_used() -> None:
    slots = StateSlots(5)
    for each in (A, B):
        slots.try_begin(each, None)
        slots.promise(each, b"one")
    slots.keep(A, b"one")
    keep(slots, A, b"two")
    slots.keep(B, b"one")
    keep(slots, A, b"three")
    keep(slots, A, b"four")
    assert [slots.count_usable([name]) for name in (b"one", b"two")] == [1, 0]


def test_as_many_kept_states_as_half_of_the_slots_are_pinned_until_their_time() -> None:
    slots = StateSlots(5)
    slots.try_begin(A, None)
    for name in (b"one", b"two", b"three"):
        keep(slots, A, name)
        slots.pin(name, until=10)
    keep(slots, A, b"four")
    keep(slots, A, b"five")
    assert [slots.count_usable([name]) for name in (b"one", b"two", b"three", b"four")] == [1, 1, 0, 1]
    slots.end_pins(10)
    for name in (b"six", b"seven", b"eight"):
        keep(slots, A, name)
    assert [slots.count_usable([name]) for name in (b"one", b"two")] == [1, 0]


def test_forgotten_states_leave_their_slots_to_new_ones() -> None:
    slots = StateSlots(3)
    slots.try_begin(A, None)
    keep(slots, A, b"one")
    slots.forget()
    assert slots.num_kept == 0
    for name in (b"two", b"three", b"four"):
        keep(slots, A, name)
    assert [slots.count_usable([name]) for name in (b"two", b"three", b"four")] == [0, 1, 1]


def test_the_last_slot_passes_from_a_kept_state_to_the_sequence_that_begins_there() -> None:
    slots = StateSlots(2)
    slots.try_begin(A, None)
    keep(slots, A, b"one")
    assert slots.try_begin(B, b"one")
    assert slots.take_copies() == []
    assert slots.num_kept == 0
    slots.check_invariants()


def test_copies_are_in_order_if_a_slot_is_released_and_taken_again_before_they_are_made() -> None:
    slots = StateSlots(3)
    slots.try_begin(A, None)
    live, kept = slots.slot_of(A), slots.promise(A, b"one")
    slots.keep(A, b"one")
    slots.release(A)
    slots.try_begin(B, b"one")
    slots.release(B)
    slots.try_begin(C, b"one")
    assert slots.slot_of(B) is None
    assert [each.source for each in slots.take_copies()] == [kept, kept]
    assert slots.slot_of(C) != kept
    assert live is not None


class SlotsMachine(RuleBasedStateMachine):
    """Each state is a text: what the slots hold after copies and steps is compared with what was kept or begun.

    A text names all that a state is of, so the same name always means the same state.
    """

    @initialize(num_slots=st.integers(1, 6), data=st.data())
    def begin(self, num_slots: int, data: st.DataObject) -> None:
        num_reserved = data.draw(st.integers(0, num_slots - 1))
        self.slots, self.most_live = StateSlots(num_slots, num_reserved), num_slots - num_reserved
        self.held = [""] * num_slots
        self.live: dict[SequenceId, str] = {}
        # Whether a step has written the state already.
        self.promised: dict[tuple[SequenceId, str], bool] = {}

    @rule()
    def step(self) -> None:
        """Make the copies, then let each sequence's state advance."""
        for source, target in self.slots.take_copies():
            self.held[target] = self.held[source]
        for sequence_id, text in self.live.items():
            slot = self.slots.slot_of(sequence_id)
            assert slot is not None
            assert not text or self.held[slot] == text
            self.live[sequence_id] = self.held[slot] = text + sequence_id[0]
        for sequence_id, text in self.promised:
            if self.live[sequence_id] == text:
                self.held[self.slots._promised[sequence_id][text.encode()]] = text
                self.promised[sequence_id, text] = True

    @property
    def has_room(self) -> bool:
        return len(self.live) + len(self.promised) < self.slots.num_slots

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sequence_id = (str(data.draw(st.integers(0, 9))), 0)
        name = data.draw(st.sampled_from([None, *sorted(self.slots._kept)]))
        if sequence_id not in self.live:
            has_room = self.has_room and len(self.live) < self.most_live
            assert self.slots.try_begin(sequence_id, name) == has_room
            if has_room:
                self.live[sequence_id] = "" if name is None else name.decode()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_waiting=st.integers(0, 5))
    def promise(self, data: st.DataObject, num_waiting: int) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        text = self.live[sequence_id] + sequence_id[0]
        if (sequence_id, text) not in self.promised:
            may_take = bool(self.slots._free) or self.slots.num_kept > len(self.promised)
            num_left = self.most_live - len(self.live)
            is_left = self.slots.num_slots - len(self.live) - len(self.promised) > min(num_left, num_waiting)
            takes_slot = self.has_room and may_take and is_left and not self.slots.count_usable([text.encode()])
            assert (self.slots.promise(sequence_id, text.encode(), num_waiting) is not None) == takes_slot
            if takes_slot:
                self.promised[sequence_id, text] = False

    @precondition(lambda self: any(self.promised.values()))
    @rule(data=st.data(), is_wanted=st.booleans())
    def keep(self, data: st.DataObject, is_wanted: bool) -> None:
        sequence_id, text = data.draw(st.sampled_from(sorted(each for each, done in self.promised.items() if done)))
        del self.promised[sequence_id, text]
        if is_wanted:
            self.slots.keep(sequence_id, text.encode())
            assert self.held[self.slots._kept[text.encode()]] == text
        else:
            self.slots.drop_promise(sequence_id, text.encode())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[sequence_id]
        self.promised = {each: done for each, done in self.promised.items() if each[0] != sequence_id}
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
