"""How often a checkpoint answers exactly right, kind by kind, on pictures that training never saw.

python training/evaluate_demo.py src/keepsight/demo/checkpoint --n 100
"""

import argparse
import time
from pathlib import Path

import torch

from ask_demo import Chat, Demo
from held_out_chats import EXAMS, Exam, held_out_chats


def evaluate(demo: Demo, exam: Exam, num_per_kind: int, seed: int, num_shown: int) -> dict[str, float]:
    """The share of whole answers that are right, by kind."""
    accuracies = {}
    for kind, chats in held_out_chats(exam, num_per_kind, seed).items():
        answers = demo.answer(chats)
        wrong = [(chat, answer) for chat, answer in zip(chats, answers, strict=True) if chat.answer != answer]
        accuracies[kind] = 1 - len(wrong) / len(chats)
        print(f"{exam.name:16} {kind:24} {accuracies[kind]:.3f} of {len(chats)}", flush=True)
        for chat, answer in wrong[:num_shown]:
            print(f"    {_prompt(chat)!r}: not {answer!r} but {chat.answer!r}")
    return accuracies


def _prompt(chat: Chat) -> str:
    content = chat.messages[-1]["content"]
    return " ".join(part.get("text", "<picture>") for part in content)


def as_table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown, with a row for each kind and one for them all."""
    kinds = sorted({kind for column in columns.values() for kind in column})
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for kind in kinds:
        cells = [f"{100 * column[kind]:.0f}" if kind in column else "" for column in columns.values()]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    means = [f"{100 * sum(column.values()) / len(column):.1f}" for column in columns.values()]
    return "\n".join([*lines, "| mean of the kinds | " + " | ".join(means) + " |"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact answers through transformers' public path.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=100, help="chats of each kind; a quarter of that where all is new")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=1, help="how many wrong answers of each kind to print")
    parser.add_argument("--exams", nargs="*", default=[exam.name for exam in EXAMS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    demo = Demo(options.checkpoint, getattr(torch, options.dtype))
    started = time.monotonic()
    columns = {}
    for exam in EXAMS:
        if exam.name in options.exams:
            num_per_kind = options.n if exam is EXAMS[0] else max(1, options.n // 4)
            columns[exam.name] = evaluate(demo, exam, num_per_kind, options.seed, options.show)
    print(f"\n{as_table(columns)}\n\n{options.dtype}, {time.monotonic() - started:.0f} seconds")


if __name__ == "__main__":
    main()
