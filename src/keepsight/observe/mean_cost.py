"""What something took the last times: a mean that forgets."""

# Of what is new in the mean.
WEIGHT = 0.2


class MeanCost:
    def __init__(self) -> None:
        # Of one; 0 as long as nothing is known.
        self.seconds = 0.0

    def note(self, seconds: float, count: int = 1) -> None:
        """It took so long for so many."""
        each = seconds / count
        self.seconds = self.seconds + WEIGHT * (each - self.seconds) if self.seconds else each

    def suggest(self, seconds: float) -> None:
        """As somebody else measured it, for as long as nothing was measured here."""
        self.seconds = self.seconds or seconds
