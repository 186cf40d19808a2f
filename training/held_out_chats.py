"""Chats that training never saw, of every kind: the cases of `evaluate_demo.py`.

Their random stream is their own. `Exam` says what else is new in them: the wording, or the style of the drawing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from ask_demo import Chat, model_message, user_message
from keepsight.demo.questions import Asker, Question, describe_scene, questions_about, questions_about_all
from keepsight.demo.scenes import (
    HELD_OUT_BACKGROUNDS,
    HELD_OUT_STYLES,
    TRAINED_BACKGROUNDS,
    TRAINED_STYLES,
    Look,
    Scene,
    random_look,
    random_number_scene,
    random_scene,
)
from other_questions import (
    ORDINALS,
    follow_up_description,
    follow_ups_about,
    greeting_with_picture,
    off_script_question,
    question_without_picture,
    small_talk_question,
)


@dataclass(frozen=True)
class Exam:
    name: str
    has_new_wordings: bool = False
    styles: Sequence[str] = TRAINED_STYLES
    backgrounds: Sequence[str] = TRAINED_BACKGROUNDS


EXAMS = (
    Exam("as trained"),
    Exam("new wordings", has_new_wordings=True),
    Exam("new styles", styles=HELD_OUT_STYLES),
    Exam("new backgrounds", backgrounds=HELD_OUT_BACKGROUNDS),
)


def held_out_chats(exam: Exam, num_per_kind: int, seed: int) -> dict[str, list[Chat]]:
    """`num_per_kind` of each kind, sorted by kind."""
    maker = _ChatMaker(Random(f"evaluate {exam.name} {seed}"), exam)
    chats: dict[str, list[Chat]] = {}
    # Kinds come unevenly: this many rounds give enough of the rarest.
    for _ in range(num_per_kind * 4):
        for chat in maker.chats():
            have = chats.setdefault(chat.kind, [])
            if len(have) < num_per_kind:
                have.append(chat)
    return dict(sorted(chats.items()))


@dataclass(frozen=True)
class _ChatMaker:
    random: Random
    exam: Exam

    def chats(self) -> Iterator[Chat]:
        """One of every kind, or nearly."""
        scenes: list[Callable[[], Scene]] = [self._number, self._single, self._several]
        for make_scene in scenes:
            yield from self._about_one(make_scene())
        yield from self._about_many(self._pictures())
        yield from self._without_picture()

    # Scenes -----------------------------------------------------------------------------------------------

    def _look(self) -> Look:
        return random_look(self.random, self.exam.styles, self.exam.backgrounds)

    def _number(self) -> Scene:
        return random_number_scene(self.random, look=self._look())

    def _single(self) -> Scene:
        return random_scene(self.random, 1, look=self._look())

    def _several(self) -> Scene:
        return random_scene(self.random, self.random.randint(2, 4), look=self._look())

    def _pictures(self) -> list[Scene]:
        mixed = [self._single, self._single, self._several, self._number]
        makers = [self._single] if self.random.random() < 0.5 else mixed
        return [self.random.choice(makers)() for _ in range(self.random.randint(2, 4))]

    # Chats ------------------------------------------------------------------------------------------------

    def _about_one(self, scene: Scene) -> Iterator[Chat]:
        new = self.exam.has_new_wordings
        asker = Asker(self.random, None, new)
        questions = questions_about(scene, asker)
        for question in questions:
            yield _chat([scene], question)
        yield _chat([scene], replace(self.random.choice(questions), kind="question_before_picture"), text_first=True)
        yield _chat([scene], replace(off_script_question(self.random, is_held_out=new), kind="off_script_with_picture"))
        yield _chat([scene], greeting_with_picture(self.random, is_held_out=new))
        yield _chat([scene], Question("no_words", "", describe_scene(scene)))
        if scene.single_thing is not None:
            for follow_up in follow_ups_about(scene.single_thing, self.random, is_held_out=new):
                yield _chat([scene], follow_up, after=questions[0])

    def _about_many(self, scenes: list[Scene]) -> Iterator[Chat]:
        new = self.exam.has_new_wordings
        first, second = self.random.sample(range(len(scenes)), 2)
        questions = questions_about(scenes[first], Asker(self.random, ORDINALS[first], new))
        for question in [*questions, *questions_about_all(scenes, self.random, is_held_out=new)]:
            is_long = question.kind == "list" and any(scene.single_thing is None for scene in scenes)
            yield _chat(scenes, replace(question, kind="list_mixed") if is_long else question)
        follow_up = follow_up_description(scenes[second], ORDINALS[second], self.random, is_held_out=new)
        yield _chat(scenes, follow_up, after=questions[0])

    def _without_picture(self) -> Iterator[Chat]:
        new = self.exam.has_new_wordings
        yield _chat([], off_script_question(self.random, is_held_out=new))
        yield _chat([], small_talk_question(self.random, is_held_out=new))
        about = questions_about(self.random.choice((self._single, self._several))(), Asker(self.random, None, new))
        yield _chat([], question_without_picture(self.random.choice(about)))


def _chat(
    scenes: Sequence[Scene], question: Question, *, after: Question | None = None, text_first: bool = False
) -> Chat:
    """`after` is the turn before, which was answered rightly."""
    if after is None:
        messages = [user_message(len(scenes), question.text, text_first=text_first)]
    else:
        messages = [
            user_message(len(scenes), after.text), model_message(after.answer), user_message(0, question.text)
        ]  # fmt: skip
    return Chat(question.kind, messages, scenes, question.answer)
