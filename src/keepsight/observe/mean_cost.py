"""Moving averages of what an operation costs in seconds."""

# The weight of a new value in the mean.
WEIGHT = 0.2


class MeanCost:
    def __init__(self) -> None:
        # The cost of one item; 0 until it is known.
        self.seconds = 0.0

    def note(self, seconds: float, count: int = 1) -> None:
        """Record that `count` items took `seconds` together."""
        each = seconds / count
        self.seconds = self.seconds + WEIGHT * (each - self.seconds) if self.seconds else each

    def suggest(self, seconds: float) -> None:
        """Use a value that was measured elsewhere, unless something was measured here."""
        self.seconds = self.seconds or seconds


class BulkCost:
    """The cost of one more item when many are made in one batch.

    Each batch has a fixed cost, which a small batch would wrongly attribute to its items. So a batch is weighted by
    the square of its size, as in a least-squares line through the origin.
    """

    def __init__(self) -> None:
        # The cost of one item; 0 until it is known.
        self.seconds = 0.0
        # The total weight of all batches.
        self._weight = 0.0

    def note(self, seconds: float, count: int) -> None:
        """Record that `count` items took `seconds` together."""
        weight = count**2
        # A batch of little weight displaces no more than its own weight.
        self._weight = max(self._weight, (1 - WEIGHT) * self._weight + weight)
        self.seconds += weight / self._weight * (seconds / count - self.seconds)
