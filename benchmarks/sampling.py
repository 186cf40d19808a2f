"""Tokens per second of 16 streams with different sampling parameters, offline, with a vocabulary of published size.

    PYTHONPATH=. python benchmarks/make_checkpoint.py wide-gemma3 FOLDER --dtype bfloat16
    PYTHONPATH=. python benchmarks/sampling.py --model FOLDER [--vllm-python PYTHON]

The cost of `top_p` alone depends on how many tokens it keeps: with random weights almost all, unless the temperature is
low.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import peer_environment, precision_of

NUM_STREAMS, NUM_TOKENS, NUM_ROUNDS = 16, 12, 5
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "top_k 64, top_p 0.95 (Gemma's)": {"top_k": 64, "top_p": 0.95},
    "top_k 64": {"top_k": 64},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, temperature 0.01": {"top_p": 0.95, "temperature": 0.01},
    "min_p 0.1": {"min_p": 0.1},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
}


def run(engine: str, model: str) -> None:
    """Measure one engine; runs in that engine's own process."""
    if engine == "vllm":
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    else:
        from keepsight import LLM, SamplingParams
    llm: Any = LLM(model, max_model_len=512, dtype=precision_of(model))
    prompts = [f"Say {number} things" for number in range(NUM_STREAMS)]
    for kind, chosen in KINDS.items():
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **chosen)
        rates = []
        for _ in range(NUM_ROUNDS + 1):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rates.append(NUM_STREAMS * NUM_TOKENS / (time.perf_counter() - started))
        print(f"RATE\t{kind}\t{statistics.median(rates[1:]):.0f}", flush=True)


def measure(engine: str, python: str, model: Path) -> dict[str, str]:
    command = [python, "-m", "benchmarks.sampling", "--model", str(model), "--engine", engine]
    answered = subprocess.run(command, env=peer_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return dict(line.split("\t")[1:] for line in answered.stdout.splitlines() if line.startswith("RATE\t"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM; without it, no vLLM")
    parser.add_argument("--engine", choices=("keepsight", "vllm"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run(arguments.engine, str(arguments.model))
        return
    pythons = {"keepsight": sys.executable, "vllm": arguments.vllm_python}
    rates = {name: measure(name, python, arguments.model) for name, python in pythons.items() if python is not None}
    print(f"tokens a second, median of {NUM_ROUNDS}: {', '.join(rates)}")
    for kind in KINDS:
        print(f"{kind:32s}", *(f"{own[kind]:>6s}" for own in rates.values()))


if __name__ == "__main__":
    main()
