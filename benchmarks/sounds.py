"""Time to the first token of a question about a sound: never heard, known, and known with another question.

    PYTHONPATH=. python benchmarks/sounds.py --model FOLDER [--vllm-python PYTHON] [--seconds 10]

Needs a model that takes sounds (`make_checkpoint.py tiny-qwen2-audio FOLDER`); they are sent as WAVs of its own rate.
"""

import argparse
import asyncio
import base64
import io
import wave
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.films import ask_servers, measure

RATE = 16_000


def draw_sound(seed: int, seconds: int) -> bytes:
    """Return a WAV of noise."""
    noise = np.random.default_rng(seed).normal(0, 3_000, seconds * RATE).astype("<i2")
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(noise.tobytes())
    return written.getvalue()


def ask_about(sound: bytes, question: str) -> list[dict[str, Any]]:
    sent = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    part = {"type": "input_audio", "input_audio": sent}
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python")
    parser.add_argument("--sounds", type=int, default=5, help="beside one to warm up (default: 5)")
    parser.add_argument("--seconds", type=int, default=10)
    arguments = parser.parse_args()
    sounds = [draw_sound(seed, arguments.seconds) for seed in range(arguments.sounds + 1)]
    asyncio.run(ask_servers(arguments, partial(measure, ask_about, sounds)))


if __name__ == "__main__":
    main()
