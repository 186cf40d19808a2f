"""The wordings of each kind of question. Only words; the right answers are in `questions.py`.

`trained` wordings were seen in training, `held_out` ones never: accuracy on them is reported on its own row. The
fields in braces are filled in by `questions.py`; a wording whose fields are not all known is not used.
"""

from dataclasses import dataclass
from random import Random
from string import Formatter


@dataclass(frozen=True)
class Wordings:
    trained: tuple[str, ...]
    held_out: tuple[str, ...] = ()

    def choose(self, random: Random, fields: dict[str, str], *, is_held_out: bool) -> str:
        wordings = self.held_out if is_held_out and self.held_out else self.trained
        usable = [wording for wording in wordings if _fields_of(wording) <= fields.keys()]
        return random.choice(usable or self.trained).format(**fields)


def _fields_of(wording: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(wording) if name}


# {picture}: "this picture", "the second image". {in}: "" or " in the second picture"; {of} likewise.
# {this} is only known if the conversation has a single picture.
WORDINGS: dict[str, Wordings] = {
    "describe": Wordings(
        (
            "What is in {picture}?",
            "What is in {picture}?",
            "Describe {picture}.",
            "Describe {picture}.",
            "What do you see in {picture}?",
            "What does {picture} show?",
            "What's in {picture}?",
            "Tell me what is in {picture}.",
            "What can you see in {picture}?",
            "Please describe {picture}.",
            "Tell me about {picture}.",
            "Can you describe {picture}?",
            "What does {picture} contain?",
            "What is {this}?",
            "Describe {this}.",
            "What do you see{nothing}?",
        ),
        ("What is shown in {picture}?", "Could you describe {picture}?"),
    ),
    "colour": Wordings(
        (
            "What {colour} is {thing}{in}?",
            "What {colour} is {thing}{in}?",
            "What is the {colour} of {thing}{in}?",
            "Which {colour} is {thing}{in}?",
            "Tell me the {colour} of {thing}{in}.",
            "Which {colour} does {thing}{in} have?",
        ),
        ("Name the {colour} of {thing}{in}.",),
    ),
    "shape": Wordings(
        (
            "What shape is in {picture}?",
            "Which shape is in {picture}?",
            "Which shape do you see{in}?",
            "Name the shape{in}.",
            "What shape is it{nothing}?",
            "What shape is {this}?",
            "Tell me the shape{in}.",
        ),
        ("What kind of shape is in {picture}?",),
    ),
    "size": Wordings(
        (
            "Is {thing} small or large{in}?",
            "Is {thing} small or large{in}?",
            "What size is {thing}{in}?",
            "How big is {thing}{in}?",
        ),
        ("What is the size of {thing}{in}?", "Is {thing} large or small{in}?"),
    ),
    "where": Wordings(
        (
            "Where is {thing}{in}?",
            "Where is {thing}{in}?",
            "What is the position of {thing}{in}?",
            "Where do you see {thing}{in}?",
            "Where can you see {thing}{in}?",
        ),
        ("Tell me where {thing} is{in}.",),
    ),
    "count": Wordings(
        (
            "How many {things} are{in_or_there}?",
            "How many {things} are{in_or_there}?",
            "How many {things} do you see{in}?",
            "Count the {things}{in}.",
            "How many {things} are in {picture}?",
            "How many {things} can you see{in}?",
        ),
        ("Tell me how many {things} are{in_or_there}.",),
    ),
    "at": Wordings(
        (
            "What is at the {position}{of}?",
            "What is at the {position}{of}?",
            "What do you see at the {position}{of}?",
            "Which shape is at the {position}{of}?",
        ),
        ("What can you see at the {position}{of}?",),
    ),
    "exist": Wordings(
        (
            "Is there {a_thing}{in}?",
            "Is there {a_thing}{in}?",
            "Do you see {a_thing}{in}?",
            "Can you see {a_thing}{in}?",
            "Does {picture} show {a_thing}?",
        ),
        ("Does {picture} contain {a_thing}?",),
    ),
    "colour_of": Wordings(
        ("What {colour} is {thing}{in}?", "What is the {colour} of {thing}{in}?", "Which {colour} is {thing}{in}?"),
    ),
    "shape_of": Wordings(
        ("What shape is {colour_name}{in}?", "Which shape is {colour_name}{in}?"),
    ),
    "number": Wordings(
        (
            "What number is written{in}?",
            "What number is written{in}?",
            "Read the number{in}.",
            "Which number do you see{in}?",
            "What is the number{in}?",
            "What number is in {picture}?",
            "What number do you read{in}?",
        ),
        ("Which number is written{in}?",),
    ),
    "list": Wordings(
        (
            "List the pictures.",
            "What is in each picture?",
            "Describe all the pictures.",
            "Describe each picture.",
            "What is in the pictures?",
            "Describe the pictures.",
        ),
        ("Describe the pictures one by one.",),
    ),
    "num_pictures": Wordings(
        ("How many pictures are there?", "How many images are there?", "How many pictures do you see?"),
        ("How many pictures can you see?", "Count the pictures."),
    ),
    "compare": Wordings(
        (
            "Is the first picture the same shape as the second?",
            "Are the pictures the same?",
            "Do the first and the second picture have the same {colour}?",
            "Which picture shows {a_thing}?",
            "Is the second picture the same {colour} as the first?",
            "What is the difference between the pictures?",
            "Are the two shapes the same?",
            "Which picture has more shapes?",
        ),
        ("Do both pictures show the same shape?", "Which picture is different?"),
    ),
    # A second turn about the single thing in the first turn's picture.
    "then_colour": Wordings(
        ("And its {colour}?", "And the {colour}?", "What {colour} is it?"), ("And what {colour} is it?",)
    ),
    "then_shape": Wordings(("And its shape?", "And the shape?", "What shape is it?"), ("And what shape is it?",)),
    "then_size": Wordings(("And its size?", "And the size?", "Is it small or large?"), ("And how big is it?",)),
    "then_where": Wordings(("And where is it?", "And its position?", "Where is it?"), ("And where?",)),
    # A second turn about another picture of the conversation; what is asked is clear only from the first turn.
    "then_describe": Wordings(
        ("And the {ordinal}?", "And the {ordinal} one?", "And the {ordinal} picture?", "What about the {ordinal}?"),
        ("And what is in the {ordinal}?",),
    ),
}

ANSWER_OFF_SCRIPT = "I only know coloured shapes in pictures."
