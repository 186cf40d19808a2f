"""What something took the last times: means that forget."""

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


class BulkCost:
    """Of things made many at once, what one more takes.

    Each time costs something by itself, which a time with few things would be mistaken to take for each.  So a time
    weighs as the square of what was made in it, as in the straight line through nothing that lies closest to all.
    """

    def __init__(self) -> None:
        # Of one; 0 as long as nothing is known.
        self.seconds = 0.0
        # What all times weigh together.
        self._weight = 0.0

    def note(self, seconds: float, count: int) -> None:
        """It took so long for so many."""
        weight = count**2
        # Only what weighs as much is forgotten for it.
        self._weight = max(self._weight, (1 - WEIGHT) * self._weight + weight)
        self.seconds += weight / self._weight * (seconds / count - self.seconds)
