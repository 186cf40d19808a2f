"""The workloads that clients send; each measures one kind of work that a server may repeat or avoid.

Everything is drawn before a clock runs, from the seed and the workload's label alone: workloads share no pictures or
words. Contents are already JSON, as nothing should be encoded during the measurement.
"""

import base64
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from keepsight.bench.draw import PICTURE_COUNT_WEIGHTS, choose_by_popularity, draw_words, photograph

# A part of a message's content, in OpenAI's form, encoded.
Part = bytes
QUESTION_WORDS = 20
MEAN_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's messages, turn by turn; every turn is sent with the conversation so far."""

    turns: tuple[tuple[Part, ...], ...]
    # The pause before the first turn.
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    # Sent one after the other before the clock starts: to warm up, and to make content known.
    before: Sequence[Conversation]
    timed: Iterable[Conversation]
    # One more client sends these, one after the other, untimed; the timed requests end with them.
    beside: Sequence[Conversation] = ()
    restarts_before_timed: bool = False

    @property
    def num_timed(self) -> int | None:
        """Return the number of timed requests; None: as many as there is time for."""
        return sum(len(each.turns) for each in self.timed) if isinstance(self.timed, Sequence) else None


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    seed: int
    num_requests: int = 16
    num_warm_up: int = 2
    picture_size: tuple[int, int] = (896, 896)
    pictures_per_request: int = 4
    num_turns: int = 4
    pool_size: int = 16
    zipf_exponent: float = 1.0
    # The percentage of the pictures shown that come from the pool.
    reuse_percent: int = 80
    # The number of words that take as many tokens as a picture, unless the server reports another number.
    words_per_picture: int = 256


class Drawer:
    def __init__(self, label: str, options: WorkloadOptions) -> None:
        self.options = options
        self.rng = random.Random(f"{options.seed} {label}")

    def picture(self) -> Part:
        jpeg = photograph(self.rng.getrandbits(63), *self.options.picture_size)
        return b'{"type":"image_url","image_url":{"url":"data:image/jpeg;base64,%s"}}' % base64.b64encode(jpeg)

    def pictures(self, count: int) -> list[Part]:
        return [self.picture() for _ in range(count)]

    def words(self, count: int = QUESTION_WORDS) -> Part:
        return json.dumps({"type": "text", "text": draw_words(self.rng, count)}).encode()

    def long_words(self) -> Part:
        return self.words(self.options.words_per_picture)

    def repeat(self, make: Callable[[], Conversation], *, least_warm_up: int = 0) -> Workload:
        """Make the same kind of conversation for the warm-up and for the timed part."""
        before = [make() for _ in range(max(least_warm_up, self.options.num_warm_up))]
        return Workload(before, [make() for _ in range(self.options.num_requests)])

    def repeat_known(self, make: Callable[[], Conversation]) -> Workload:
        """Like `repeat`, but with at least one warm-up, so that what the conversations have in common is known."""
        return self.repeat(make, least_warm_up=1)


def once(*parts: Part) -> Conversation:
    return Conversation((parts,))


def cold(draw: Drawer) -> Workload:
    return draw.repeat(lambda: once(draw.picture(), draw.words()))


def same_picture_same_prompt(draw: Drawer) -> Workload:
    conversation = once(draw.picture(), draw.words())
    return draw.repeat_known(lambda: conversation)


def same_picture_new_prompt(draw: Drawer) -> Workload:
    picture = draw.picture()
    return draw.repeat_known(lambda: once(picture, draw.words()))


def new_prompt_before_same_picture(draw: Drawer) -> Workload:
    picture = draw.picture()
    return draw.repeat_known(lambda: once(draw.words(), picture))


def text_only(draw: Drawer) -> Workload:
    return draw.repeat(lambda: once(draw.long_words(), draw.words()))


def same_text_new_prompt(draw: Drawer) -> Workload:
    text = draw.long_words()
    return draw.repeat_known(lambda: once(text, draw.words()))


def multi_turn(draw: Drawer) -> Workload:
    num_turns = draw.options.num_turns

    def make() -> Conversation:
        return Conversation(((draw.picture(), draw.words()), *((draw.words(),) for _ in range(num_turns - 1))))

    num_conversations = -(-draw.options.num_requests // num_turns)
    return Workload([make()] if draw.options.num_warm_up else [], [make() for _ in range(num_conversations)])


def zipf(draw: Drawer) -> Workload:
    """Show pictures of a pool that was shown before, chosen by popularity; the rest is new."""
    options, rng = draw.options, draw.rng
    pool = draw.pictures(options.pool_size)

    def make() -> Conversation:
        [count] = rng.choices(list(PICTURE_COUNT_WEIGHTS), list(PICTURE_COUNT_WEIGHTS.values()))
        known = choose_by_popularity(rng, len(pool), min(count, len(pool)), options.zipf_exponent)
        shown = [pool[index] if rng.random() * 100 < options.reuse_percent else draw.picture() for index in known]
        shown.insert(rng.randrange(len(shown) + 1), draw.words())
        return once(*shown)

    before = [once(picture, draw.words()) for picture in pool]
    return Workload(before, [make() for _ in range(options.num_requests)])


def many_pictures(draw: Drawer) -> Workload:
    """Show a random half of a pool of known pictures, in another order each time."""
    count = draw.options.pictures_per_request
    pool = draw.pictures(2 * count)
    before = [once(*pool[:count], draw.words()), once(*pool[count:], draw.words())]
    timed = [once(*draw.rng.sample(pool, count), draw.words()) for _ in range(draw.options.num_requests)]
    return Workload(before, timed)


def text_beside_pictures(draw: Drawer) -> Workload:
    """Ask short questions without pictures, while another client shows one new picture after the other.

    Each client waits for a random time after its last answer: sent as soon as the server has time, its requests would
    miss the server's pauses.
    """
    # Drawn first, as the timed requests are drawn while they are sent.
    beside = [once(draw.picture(), draw.words()) for _ in range(draw.options.num_requests)]
    before = [once(draw.picture(), draw.words()), once(draw.words())] * max(1, draw.options.num_warm_up)
    pauses = (draw.rng.expovariate(1 / MEAN_PAUSE_SECONDS) for _ in itertools.count())
    return Workload(before, (Conversation(((draw.words(),),), pause) for pause in pauses), beside)


def restart(draw: Drawer) -> Workload:
    """Show pictures that were known before the server was restarted."""
    pictures = draw.pictures(draw.options.num_requests)
    before = [once(picture, draw.words()) for picture in pictures]
    return Workload(before, [once(picture, draw.words()) for picture in pictures], restarts_before_timed=True)


WORKLOADS: dict[str, Callable[[Drawer], Workload]] = {
    "cold": cold,
    "same-picture-same-prompt": same_picture_same_prompt,
    "same-picture-new-prompt": same_picture_new_prompt,
    "new-prompt-same-picture": new_prompt_before_same_picture,
    "text-only": text_only,
    "same-text-new-prompt": same_text_new_prompt,
    "multi-turn": multi_turn,
    "zipf": zipf,
    "many-pictures": many_pictures,
    "text-beside-pictures": text_beside_pictures,
    "restart": restart,
}
# Workloads without pictures, whose prompts are as long as one with a picture, by the server's own count.
AS_LONG_AS_A_PICTURE = frozenset({"text-only", "same-text-new-prompt"})


def label_of(name: str, options: WorkloadOptions) -> str:
    """Return the workload's label; `zipf` is a different workload with each share of reuse."""
    return f"zipf-{options.reuse_percent}" if name == "zipf" else name


def draw_workload(name: str, options: WorkloadOptions) -> Workload:
    return WORKLOADS[name](Drawer(label_of(name, options), options))
