"""`keepsight generate`: one question, one answer on standard output."""

import argparse
import base64
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from keepsight.cli.end_on_ctrl_c import ending_on_ctrl_c
from keepsight.cli.model_arguments import add_model, add_model_arguments, config_from
from keepsight.cli.read_picture import read_file, read_picture
from keepsight.cli.strip_controls import strip_controls
from keepsight.errors import renaming_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to ask")
    add_model(parser)
    parser.add_argument("--image", action="append", default=[], type=Path, help="a picture; may be given several times")
    parser.add_argument("--video", action="append", default=[], type=Path, help="a film; may be given several times")
    parser.add_argument("--audio", action="append", default=[], type=Path, help="a sound; may be given several times")
    parser.add_argument("--file", action="append", default=[], type=Path, help="a PDF; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    parser.add_argument("--seed", type=int, help="makes a temperature above 0 repeatable")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    content: list[dict[str, Any]] = [
        {"type": "image_pil", "image_pil": read_picture(path, "--image")} for path in arguments.image
    ]
    content += [{"type": "video", "video": read_file(path, "--video")} for path in arguments.video]
    content += [{"type": "audio", "audio": read_file(path, "--audio")} for path in arguments.audio]
    content += [_to_part(path) for path in arguments.file]
    paths = [*arguments.image, *arguments.video, *arguments.audio, *arguments.file]
    content.append({"type": "text", "text": arguments.prompt})

    with ending_on_ctrl_c():
        from keepsight.llm import LLM  # after all checks that do not need torch
        from keepsight.sampling_params import SamplingParams

    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=arguments.seed)
    with LLM.from_config(config) as llm, renaming_fields(partial(_name_as_given, paths=paths)):
        [answer] = llm.chat([{"role": "user", "content": content}], params)
        print(strip_controls(answer.outputs[0].text))
    return 0


def _name_as_given(field: str, paths: Sequence[Path]) -> str:
    """Return the path of the file in which a fault was found, or the field itself if it is in none."""
    found = re.match(r"messages\[0\]\.content\[(\d+)\]", field)
    index = int(found[1]) if found else len(paths)
    return str(paths[index]) if index < len(paths) else field


def _to_part(pdf: Path) -> dict[str, Any]:
    data = base64.b64encode(read_file(pdf, "--file")).decode()
    return {"type": "file", "file": {"file_data": data, "filename": pdf.name}}
