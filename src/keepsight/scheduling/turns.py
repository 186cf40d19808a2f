"""In throughput mode, lets encodings and steps take turns, so that each has the whole machine.

Side by side they would share it, and wait for each other to end. A turn is one step that computes prompts, or one
round of encodings; neither waits for more than one turn of the other.
"""

from keepsight.scheduling.encodings import Encodings
from keepsight.scheduling.step_draft import StepDraft
from keepsight.scheduling.step_plan import Encoding


class Turns:
    def __init__(self, encodings: Encodings, *, are_taken: bool) -> None:
        self._encodings, self._are_taken = encodings, are_taken
        self._was_for_prompts = False

    @property
    def is_encoders(self) -> bool:
        """True if it is the encoder's turn, so nothing else is computed."""
        is_due = self._was_for_prompts and self._encodings.are_waiting
        return self._are_taken and (self._encodings.are_given or is_due)

    def take_encodings(self, draft: StepDraft) -> list[Encoding]:
        """Return the encodings to start beside this step."""
        self._was_for_prompts = draft.has_prompts(joins=True) or draft.has_prompts(joins=False)
        if self._are_taken and (self._encodings.are_given or self._was_for_prompts):
            return []
        return self._encodings.take()
