"""Questions about pictures and their right answers. Reads scenes, never pixels.

Every question has one right answer, word for word, so that a test can compare whole answers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from keepsight.demo.scenes import COLOURS, POSITIONS, SHAPES, Scene, Thing
from keepsight.demo.wordings import ANSWER_OFF_SCRIPT, WORDINGS

NUMBER_WORDS = ("zero", "one", "two", "three", "four")


@dataclass(frozen=True)
class Question:
    """A question and its answer. `kind` is the row of the accuracy table that it counts for."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Asker:
    """Words questions about one picture. `ordinal` is its place ("second") if there are several, else None."""

    random: Random
    ordinal: str | None = None
    is_held_out: bool = False

    def ask(self, kind: str, answer: str, wording: str | None = None, **fields: str) -> Question:
        known = {**self._fields(), **fields}
        text = WORDINGS[wording or kind].choose(self.random, known, is_held_out=self.is_held_out)
        return Question(kind if self.ordinal is None else f"nth_{kind}", text, answer)

    def _fields(self) -> dict[str, str]:
        picture = self.random.choice(("picture", "picture", "image"))
        fields = {"colour": self.random.choice(("colour", "color"))}
        if self.ordinal is None:
            this = self.random.choice((f"this {picture}", f"this {picture}", f"the {picture}"))
            return fields | {
                "picture": this, "in": "", "of": "", "in_or_there": " there", "this": "this", "nothing": ""
            }  # fmt: skip
        named = f"the {self.ordinal} {picture}"
        where = f" in {named}"
        return fields | {"picture": named, "in": where, "of": f" of {named}", "in_or_there": where}


# Descriptions of a picture ------------------------------------------------------------------------------------


def describe_scene(scene: Scene) -> str:
    if scene.number is not None:
        return f"The number {scene.number.value}."
    thing = scene.single_thing
    if thing is not None:
        return f"A {thing.size} {thing.colour} {thing.shape} at the {thing.position}."
    return sentence(mention_scene(scene))


def mention_scene(scene: Scene) -> str:
    """Describe a scene as part of a list of pictures, without sizes and positions."""
    if scene.number is not None:
        return f"the number {scene.number.value}"
    return _enumerate([with_article(_name(thing)) for thing in scene.things])


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _enumerate(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


# Questions about one picture ----------------------------------------------------------------------------------


def questions_about(scene: Scene, asker: Asker) -> list[Question]:
    """Return one question of every kind that makes sense for this picture, each with a newly drawn wording."""
    if scene.number is not None:
        questions = [asker.ask("number", describe_scene(scene))]
    elif scene.single_thing is not None:
        questions = _about_single_thing(scene.single_thing, asker)
    else:
        questions = _about_several_things(scene, asker)
    kind = {0: "describe_number", 1: "describe_one"}.get(len(scene.things), "describe_several")
    return [
        asker.ask(kind, describe_scene(scene), "describe"),
        asker.ask("count", sentence(NUMBER_WORDS[len(scene.things)]), things="shapes"),
        *questions,
    ]


def _about_single_thing(thing: Thing, asker: Asker) -> list[Question]:
    name = asker.random.choice(("the shape", f"the {thing.shape}", "it" if asker.ordinal is None else "the shape"))
    return [
        asker.ask("colour", sentence(thing.colour), thing=name),
        asker.ask("shape", sentence(with_article(thing.shape))),
        asker.ask("size", sentence(thing.size), thing=name),
        asker.ask("where", sentence(thing.position), thing=name),
        _ask_whether_there_is((thing,), asker),
        asker.ask("no_number", "There is no number.", "number"),
    ]


def _about_several_things(scene: Scene, asker: Asker) -> list[Question]:
    things = scene.things
    random = asker.random
    shape = random.choice(things).shape if random.random() < 0.85 else random.choice(SHAPES)
    num_of_shape = sum(thing.shape == shape for thing in things)
    questions = [
        asker.ask("count_shape", sentence(NUMBER_WORDS[num_of_shape]), "count", things=plural(shape)),
        _ask_what_is_at(things, asker),
        _ask_whether_there_is(things, asker),
    ]
    if unique := _unique_by(things, _name):
        thing = random.choice(unique)
        questions.append(asker.ask("where_among", sentence(thing.position), "where", thing=f"the {_name(thing)}"))
    if unique := _unique_by(things, lambda thing: thing.shape):
        thing = random.choice(unique)
        questions.append(asker.ask("colour_of", sentence(thing.colour), thing=f"the {thing.shape}"))
        questions.append(asker.ask("where_by_shape", sentence(thing.position), "where", thing=f"the {thing.shape}"))
    if unique := _unique_by(things, lambda thing: thing.colour):
        thing = random.choice(unique)
        answer = sentence(with_article(thing.shape))
        questions.append(asker.ask("shape_of", answer, colour_name=thing.colour))
    return questions


def _unique_by(things: Sequence[Thing], name: Callable[[Thing], str]) -> list[Thing]:
    counts = Counter(map(name, things))
    return [thing for thing in things if counts[name(thing)] == 1]


def _ask_what_is_at(things: Sequence[Thing], asker: Asker) -> Question:
    if asker.random.random() < 0.15:
        free = set(range(len(POSITIONS))) - {thing.cell for thing in things}
        return asker.ask("at", "Nothing.", position=POSITIONS[asker.random.choice(sorted(free))])
    thing = asker.random.choice(things)
    return asker.ask("at", sentence(with_article(_name(thing))), position=thing.position)


def _ask_whether_there_is(things: Sequence[Thing], asker: Asker) -> Question:
    """Ask for a thing that is there half the time, else for one that differs in color or shape from one that is."""
    random = asker.random
    thing = random.choice(things)
    colour, shape = thing.colour, thing.shape
    if random.random() < 0.5:
        colour, shape = (colour, random.choice(SHAPES)) if random.random() < 0.5 else (random.choice([*COLOURS]), shape)
    is_there = any((other.colour, other.shape) == (colour, shape) for other in things)
    return asker.ask("exist", "Yes." if is_there else "No.", a_thing=with_article(f"{colour} {shape}"))


# Questions about several pictures ----------------------------------------------------------------------------


def questions_about_all(scenes: Sequence[Scene], random: Random, *, is_held_out: bool = False) -> list[Question]:
    asker = Asker(random, None, is_held_out)
    listing = " ".join(f"{place}: {mention_scene(scene)}." for place, scene in enumerate(scenes, 1))
    a_thing = with_article(f"{random.choice([*COLOURS])} {random.choice(SHAPES)}")
    return [
        asker.ask("list", listing),
        asker.ask("num_pictures", sentence(NUMBER_WORDS[len(scenes)])),
        asker.ask("compare", ANSWER_OFF_SCRIPT, a_thing=a_thing),
    ]
