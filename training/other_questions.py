"""What the demo model is taught beside questions about one picture: later turns, small talk, and prompts about none."""

from dataclasses import dataclass
from random import Random

from keepsight.demo.questions import Asker, Question, describe_scene, sentence, with_article
from keepsight.demo.scenes import Scene, Thing
from keepsight.demo.wordings import ANSWER_OFF_SCRIPT, Wordings
from off_script import off_script_prompt

ORDINALS = ("first", "second", "third", "fourth")
ANSWER_WITHOUT_PICTURE = "There is no picture."


@dataclass(frozen=True)
class SmallTalk:
    prompts: Wordings
    answer: str
    answer_with_picture: str = ""


GREETING = SmallTalk(
    Wordings(
        ("Hello", "Hello!", "Hi", "Hi!", "Good morning.", "Hello there!", "Good evening."), ("Hi there!", "Good day.")
    ),
    "Hello! Show me a picture and ask me about it.",
    "Hello! Ask me what I see.",
)
SMALL_TALK = (
    GREETING,
    SmallTalk(
        Wordings(
            ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
            ("Tell me who you are.",),
        ),
        "I am a tiny model that sees coloured shapes.",
    ),
    SmallTalk(
        Wordings(
            ("What can you do?", "Help", "Help me.", "What do you do?", "How can you help me?"),
            ("What can I ask you?",),
        ),
        "I can describe coloured shapes in pictures.",
    ),
    SmallTalk(
        Wordings(("Thank you.", "Thanks!", "Thanks", "Thank you!", "Many thanks."), ("Thank you very much.",)),
        "You are welcome.",
    ),
    SmallTalk(
        Wordings(
            ("What colours do you know?", "Which colors do you know?", "Which colours can you name?"),
            ("Name the colours you know.",),
        ),
        "Red, orange, yellow, green, cyan, blue, purple and pink.",
    ),
    SmallTalk(
        Wordings(
            ("What shapes do you know?", "Which shapes do you know?", "Which shapes can you name?"),
            ("Name the shapes you know.",),
        ),
        "Circles, squares, triangles, diamonds, stars, crosses, hearts and rings.",
    ),
)


def follow_ups_about(thing: Thing, random: Random, *, is_held_out: bool = False) -> list[Question]:
    """For a later turn, after the one thing of a picture has been talked about."""
    asker = Asker(random, None, is_held_out)
    return [
        asker.ask("then_colour", sentence(thing.colour)),
        asker.ask("then_shape", sentence(with_article(thing.shape))),
        asker.ask("then_size", sentence(thing.size)),
        asker.ask("then_where", sentence(thing.position)),
    ]


def follow_up_description(scene: Scene, ordinal: str, random: Random, *, is_held_out: bool = False) -> Question:
    """For the turn after another picture of the same conversation was described."""
    return Asker(random, None, is_held_out).ask("then_describe", describe_scene(scene), ordinal=ordinal)


def off_script_question(random: Random, *, is_held_out: bool = False) -> Question:
    return Question("off_script", off_script_prompt(random, is_held_out=is_held_out), ANSWER_OFF_SCRIPT)


def greeting_with_picture(random: Random, *, is_held_out: bool = False) -> Question:
    text = GREETING.prompts.choose(random, {}, is_held_out=is_held_out)
    return Question("greeting", text, GREETING.answer_with_picture)


def small_talk_question(random: Random, *, is_held_out: bool = False) -> Question:
    talk = random.choice(SMALL_TALK)
    return Question("small_talk", talk.prompts.choose(random, {}, is_held_out=is_held_out), talk.answer)


def question_without_picture(question: Question) -> Question:
    """The same words where no picture was sent."""
    return Question("no_picture", question.text, ANSWER_WITHOUT_PICTURE)
