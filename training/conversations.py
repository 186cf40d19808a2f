"""Random conversations about random pictures, as text: what is asked, in which layout, and the right answers.

A conversation shares its pictures between several branches; each branch alone with the common opening is exactly one
chat as the chat template would write it. Nothing here knows tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from keepsight.demo.questions import Asker, Question, describe_scene, questions_about, questions_about_all
from keepsight.demo.scenes import COLOURS, SHAPES, Scene, random_number_scene, random_scene
from other_questions import (
    ORDINALS,
    follow_up_description,
    follow_ups_about,
    greeting_with_picture,
    off_script_question,
    question_without_picture,
    small_talk_question,
)

# Stands for one picture in the text of a conversation.
PICTURE = "<picture>"
BOS = "<bos>"
USER = "<start_of_turn>user\n"
MODEL = "<end_of_turn>\n<start_of_turn>model\n"
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant.", "Answer in few words.", "Be exact.")

# How often a kind is picked, relative to the others that make sense for a picture. What is hard to learn comes often.
KIND_WEIGHTS = {
    "describe_one": 1.5,
    "describe_several": 3.0,
    "where_among": 2.0,
    "where_by_shape": 3.0,
    "count_shape": 5.0,
    "colour_of": 4.0,
    "at": 2.0,
    "where": 2.0,
    "count": 0.7,
    "shape_of": 0.7,
    "exist": 0.6,
    "colour": 0.5,
    "size": 0.7,
    "no_number": 0.2,
}


@dataclass(frozen=True)
class Turn:
    """What is written before the answer, role marks included, and the answer."""

    prompt: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Conversation:
    scenes: tuple[Scene, ...]
    opening: str
    branches: tuple[tuple[Turn, ...], ...]


@dataclass(frozen=True)
class ConversationMaker:
    """`is_held_out` asks in wordings that training never uses."""

    random: Random
    num_branches: int = 4
    is_held_out: bool = False

    def about_one_picture(self) -> Conversation:
        scene = self._scene()
        questions = self._questions_about(scene)
        if self.random.random() < 0.1 and scene.single_thing is not None:
            return self._dialogues_about_one(scene, questions)
        return self._lay_out((scene,), questions)

    def about_several_pictures(self) -> Conversation:
        scenes = self._several_scenes()
        choice = self.random.random()
        if choice < 0.08:
            return self._dialogues_about_several(scenes)
        if choice < 0.16:
            return self._one_picture_a_turn(scenes)
        return self._lay_out(scenes, self._questions_about_several(scenes))

    def without_picture(self) -> Conversation:
        questions = [self._question_without_picture() for _ in range(self.num_branches * 2)]
        return Conversation((), BOS, tuple((self._turn(USER, question),) for question in questions))

    # Scenes -----------------------------------------------------------------------------------------------

    def _scene(self) -> Scene:
        if self.random.random() < 0.15:
            return random_number_scene(self.random)
        return random_scene(self.random, self.random.choice((1, 1, 2, 2, 3, 3, 4, 4)))

    def _several_scenes(self) -> tuple[Scene, ...]:
        """Half the time one thing in each; colours and shapes repeat, so that guessing by them does not pay."""
        num_pictures = self.random.choice((2, 3, 3, 4, 4))
        only_single = self.random.random() < 0.5
        shape, colour = self.random.choice(SHAPES), self.random.choice([*COLOURS])
        return tuple(self._one_of_several(shape, colour, only_single=only_single) for _ in range(num_pictures))

    def _one_of_several(self, shape: str, colour: str, *, only_single: bool) -> Scene:
        random = self.random
        kind = 1.0 if only_single else random.random()
        if kind < 0.2:
            return random_number_scene(random)
        if kind < 0.55:
            return random_scene(random, random.randint(2, 4))
        repeated_shape = shape if random.random() < 0.3 else None
        return random_scene(random, 1, shape=repeated_shape, colour=colour if random.random() < 0.3 else None)

    # Questions --------------------------------------------------------------------------------------------

    def _questions_about(self, scene: Scene) -> list[Question]:
        """Return questions; with several things in the scene, more of them, as two draws ask for different things."""
        num_draws = 2 if len(scene.things) > 1 else 1
        questions = [question for _ in range(num_draws) for question in self._about_shapes(scene, None)]
        chosen = _weighted_sample(self.random, questions, self.num_branches + 2 * (num_draws - 1))
        if self.random.random() < 0.3:
            chosen[-1] = off_script_question(self.random, is_held_out=self.is_held_out)
        elif self.random.random() < 0.08:
            chosen[-1] = greeting_with_picture(self.random, is_held_out=self.is_held_out)
        elif self.random.random() < 0.05:
            chosen[-1] = Question("no_words", "", describe_scene(scene))
        return chosen

    def _questions_about_several(self, scenes: Sequence[Scene]) -> list[Question]:
        random = self.random
        chosen: list[Question] = []
        for place in random.sample(range(len(scenes)), 2):
            asker = Asker(random, self._ordinal(place, len(scenes)), self.is_held_out)
            describe, *others = questions_about(scenes[place], asker)
            chosen += _weighted_sample(random, others, 2)
            if random.random() < 0.6:
                chosen.append(describe)
        listing, counting, comparing = questions_about_all(scenes, random, is_held_out=self.is_held_out)
        extras = [(listing, 0.7), (counting, 0.15), (comparing, 0.2)]
        extras.append((off_script_question(random, is_held_out=self.is_held_out), 0.12))
        extras.append((greeting_with_picture(random, is_held_out=self.is_held_out), 0.04))
        return [question for question, chance in extras if random.random() < chance] + chosen

    def _ordinal(self, place: int, num_pictures: int) -> str:
        is_last = place == num_pictures - 1
        return "last" if is_last and self.random.random() < 0.2 else ORDINALS[place]

    def _question_without_picture(self) -> Question:
        choice = self.random.random()
        if choice < 0.3:
            return off_script_question(self.random, is_held_out=self.is_held_out)
        if choice < 0.5:
            return small_talk_question(self.random, is_held_out=self.is_held_out)
        ordinal = self.random.choice((None, None, *ORDINALS))
        if choice < 0.6:
            return question_without_picture(self.random.choice(questions_about_all([self._scene()], self.random)[:2]))
        return question_without_picture(self.random.choice(self._about_shapes(self._scene(), ordinal)))

    def _about_shapes(self, scene: Scene, ordinal: str | None) -> list[Question]:
        return questions_about(scene, Asker(self.random, ordinal, self.is_held_out))

    # Layouts ----------------------------------------------------------------------------------------------

    def _lay_out(self, scenes: tuple[Scene, ...], questions: list[Question]) -> Conversation:
        choice = self.random.random()
        if choice < 0.4:
            return self._question_first(scenes, self.random.sample(questions, min(3, len(questions))))
        opening = BOS + USER + self._system_prompt()
        if choice < 0.45:
            opening += "".join(f"Picture {place}:{PICTURE}" for place in range(1, len(scenes) + 1))
        else:
            separator = "\n" if self.random.random() < 0.1 else ""
            opening += PICTURE + (separator + PICTURE) * (len(scenes) - 1) + separator
        return Conversation(scenes, opening, tuple((self._turn("", question),) for question in questions[:6]))

    def _question_first(self, scenes: tuple[Scene, ...], questions: list[Question]) -> Conversation:
        pictures = PICTURE * len(scenes)
        turns = [
            Turn(USER + self._sloppy(question.text) + pictures + MODEL, question.answer, question.kind)
            for question in questions
        ]
        return Conversation(scenes, BOS, tuple((turn,) for turn in turns))

    def _dialogues_about_one(self, scene: Scene, questions: list[Question]) -> Conversation:
        thing = scene.single_thing
        assert thing is not None
        branches = []
        for question in questions[:2]:
            later = self.random.sample(follow_ups_about(thing, self.random, is_held_out=self.is_held_out), 2)
            branches.append((self._turn("", question), *(self._turn("\n" + USER, each) for each in later)))
        return Conversation((scene,), BOS + USER + PICTURE, tuple(branches))

    def _dialogues_about_several(self, scenes: tuple[Scene, ...]) -> Conversation:
        branches = []
        for _ in range(2):
            first, *later = self.random.sample(range(len(scenes)), len(scenes))
            describe = questions_about(scenes[first], Asker(self.random, ORDINALS[first], self.is_held_out))[0]
            turns = [self._turn("", describe)]
            for place in later:
                question = follow_up_description(
                    scenes[place], ORDINALS[place], self.random, is_held_out=self.is_held_out
                )
                turns.append(self._turn("\n" + USER, question))
            branches.append(tuple(turns))
        return Conversation(scenes, BOS + USER + PICTURE * len(scenes), tuple(branches))

    def _one_picture_a_turn(self, scenes: tuple[Scene, ...]) -> Conversation:
        turns = []
        for place, scene in enumerate(scenes):
            describe = questions_about(scene, Asker(self.random, None, self.is_held_out))[0]
            before = ("\n" if place else "") + USER + PICTURE
            turns.append(self._turn(before, Question("picture_a_turn", describe.text, describe.answer)))
        question = self.random.choice(self._questions_about_several(scenes))
        turns.append(self._turn("\n" + USER, question))
        return Conversation(scenes, BOS, (tuple(turns),))

    def _turn(self, before: str, question: Question) -> Turn:
        return Turn(before + self._sloppy(question.text) + MODEL, question.answer, question.kind)

    def _system_prompt(self) -> str:
        return self.random.choice(SYSTEM_PROMPTS) + "\n\n" if self.random.random() < 0.06 else ""

    def _sloppy(self, text: str) -> str:
        """Users leave out capitals and marks."""
        if text and self.random.random() < 0.12:
            text = text[0].lower() + text[1:]
        return text.rstrip("?.!") if self.random.random() < 0.12 else text


def _weighted_sample(random: Random, questions: Sequence[Question], num_questions: int) -> list[Question]:
    """Sample without replacement, in random order."""

    def key(question: Question) -> float:
        return float(random.random() ** (1 / KIND_WEIGHTS.get(question.kind.removeprefix("nth_"), 1.0)))

    return sorted(questions, key=key, reverse=True)[:num_questions]
