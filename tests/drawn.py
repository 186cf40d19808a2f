"""Drawn pictures with questions whose correct answers are known, and the ways to send a picture."""

import base64
import io
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image

from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.questions import Asker, Question, describe_scene, questions_about, questions_about_all
from keepsight.demo.scenes import Scene, plain_look, random_scene


@dataclass(frozen=True)
class Drawn:
    scene: Scene
    picture: Image.Image
    questions: list[Question]

    @property
    def description(self) -> str:
        return describe_scene(self.scene)

    @property
    def data_url(self) -> str:
        return to_data_url(to_png(self.picture))


def draw(seed: int) -> Drawn:
    scene = random_scene(Random(seed), 1, look=plain_look(224))
    return Drawn(scene, draw_scene(scene), questions_about(scene, Asker(Random(seed))))


def list_question(drawings: list[Drawn]) -> Question:
    """Return the question that asks what is in each of several pictures."""
    return questions_about_all([each.scene for each in drawings], Random(1))[0]


def to_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def to_data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def by_url(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_data_url(to_png(picture))}}


def by_object(picture: object) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": picture}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    """Return a conversation of one user turn."""
    return [{"role": "user", "content": [say(part) if isinstance(part, str) else part for part in parts]}]
