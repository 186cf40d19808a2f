"""The learning rate over the steps of a run: warm up, stay, cool down. It knows steps only, never the clock."""

from dataclasses import dataclass


@dataclass
class Schedule:
    """Warm up, stay, cool down. All in steps."""

    warm_up: int
    last_step: int
    cool_down: int
    cool_down_from: int | None = None

    def factor(self, step: int) -> float:
        if self.cool_down_from is None:
            return min(1.0, (step + 1) / self.warm_up)
        return max(0.0, 1.0 - (step - self.cool_down_from) / self.cool_down)

    def is_done(self, step: int) -> bool:
        return self.cool_down_from is not None and step >= self.cool_down_from + self.cool_down

    def finish_in(self, step: int, num_steps: int) -> None:
        """Go from the present rate to zero. A cool-down under way becomes shorter or longer."""
        self.cool_down = round(num_steps / self.factor(step))
        self.cool_down_from = step + num_steps - self.cool_down

    def is_due(self, step: int) -> bool:
        return self.cool_down_from is None and step + self.cool_down >= self.last_step
