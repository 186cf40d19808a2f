"""Keepsight, transformers and vLLM behind one interface, each in a process of its own that has the machine to itself.

    python -m benchmarks.peers ENGINE FOLDER MODEL     (what `measure` runs, with the interpreter that has the engine)

All compute on all cores in the checkpoint's precision, which is not every engine's default for float32; loading is not
counted.  Independent of what is measured: it answers a workload's batches one after the other, and reports how long
each took.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.workload import Request, Workload, to_messages

MAX_MODEL_LEN = 8192
TRANSFORMERS_BATCH_SIZE = 8
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass(frozen=True, slots=True)
class Answer:
    num_prompt_tokens: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class BatchResult:
    seconds: float
    answers: list[Answer]
    # The number of pictures that were encoded, if the engine reports it.
    num_encoded: int | None = None


# Takes requests, JPEG files and the length of an answer; returns answers in the order of the requests.
AnswerAll = Callable[[Sequence[Request], Sequence[bytes], int], list[Answer]]


@dataclass(frozen=True, slots=True)
class Engine:
    answer: AnswerAll
    # Returns how many pictures it has encoded so far.
    count_encoded: Callable[[], int] | None = None


def precision_of(model: Path | str) -> str:
    return str(json.loads((Path(model) / "config.json").read_text())["dtype"])


# In the process of the engine ---------------------------------------------------------------------------------


def load_keepsight(model: str, image_backend: str = "torchvision") -> Engine:
    from keepsight.llm import LLM
    from keepsight.sampling_params import SamplingParams

    count = count_encodings()
    llm = LLM(model, max_model_len=MAX_MODEL_LEN, dtype=precision_of(model), image_backend=image_backend)
    return Engine(_through_llm(llm, SamplingParams), count)


def count_encodings() -> Callable[[], int]:
    """Count what the plans of all runners in this process tell them to encode."""
    from keepsight.runner.model_runner import ModelRunner
    from keepsight.scheduling.step_plan import Encoding, StepPlan, StepResult

    encodings: list[Encoding] = []
    run = ModelRunner.run

    def run_and_count(self: ModelRunner, plan: StepPlan) -> StepResult:
        encodings.extend(plan.encode)
        return run(self, plan)

    ModelRunner.run = run_and_count  # type: ignore[method-assign]
    return lambda: len(encodings)


def load_vllm(model: str) -> Engine:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, max_model_len=MAX_MODEL_LEN, dtype=precision_of(model))
    return Engine(_through_llm(llm, SamplingParams))


def _through_llm(llm: Any, sampling_params: Any) -> AnswerAll:
    """Use the interface that Keepsight and vLLM have in common."""

    def answer(requests: Sequence[Request], pictures: Sequence[bytes], max_tokens: int) -> list[Answer]:
        params = sampling_params(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.chat([to_messages(each, pictures) for each in requests], params, use_tqdm=False)
        return [Answer(len(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]

    return answer


def load_transformers(model: str) -> Engine:
    import torch
    from transformers import AutoProcessor, Gemma3ForConditionalGeneration

    make_processor: Any = AutoProcessor.from_pretrained
    load: Any = Gemma3ForConditionalGeneration.from_pretrained
    processor, loaded = make_processor(model, padding_side="left"), load(model, dtype=precision_of(model)).eval()
    loaded.generation_config.eos_token_id = None  # no answer ends early

    def answer(requests: Sequence[Request], pictures: Sequence[bytes], max_tokens: int) -> list[Answer]:
        answers = []
        for start in range(0, len(requests), TRANSFORMERS_BATCH_SIZE):
            batch = requests[start : start + TRANSFORMERS_BATCH_SIZE]
            inputs = _to_tensors(processor, batch, pictures)
            with torch.inference_mode():
                outputs = loaded.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            lengths, width = inputs["attention_mask"].sum(1).tolist(), inputs["input_ids"].shape[1]
            answers += [Answer(length, row[width:]) for length, row in zip(lengths, outputs.tolist(), strict=True)]
        return answers

    return Engine(answer)


def _to_tensors(processor: Any, requests: Sequence[Request], pictures: Sequence[bytes]) -> Any:
    from PIL import Image

    texts, shown = [], []
    for request in requests:
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in request]
        message = {"role": "user", "content": content}
        texts.append(processor.apply_chat_template([message], add_generation_prompt=True))
        shown.append([Image.open(io.BytesIO(pictures[part])) for part in request if isinstance(part, int)])
    # The template has already written the <bos>.
    images = shown if any(shown) else None
    return processor(text=texts, images=images, padding=True, add_special_tokens=False, return_tensors="pt")


LOADERS: dict[str, Callable[[str], Engine]] = {
    "keepsight": load_keepsight,
    # With the pixels of a transformers without torchvision.
    "keepsight-pil": partial(load_keepsight, image_backend="pil"),
    "transformers": load_transformers,
    "vllm": load_vllm,
}


def answer_batches(engine: Engine, workload: Workload) -> list[BatchResult]:
    count = engine.count_encoded or (lambda: 0)
    results = []
    for batch in workload.batches:
        num_before, started = count(), time.perf_counter()
        answers = engine.answer(batch, workload.pictures, workload.max_tokens)
        seconds, num_encoded = time.perf_counter() - started, count() - num_before
        results.append(BatchResult(seconds, answers, num_encoded if engine.count_encoded else None))
    return results


def main() -> None:
    name, folder, model = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    results = answer_batches(LOADERS[name](model), Workload.load(folder))
    (folder / "results.json").write_text(json.dumps([asdict(each) for each in results]))


# In the process of the benchmark ------------------------------------------------------------------------------


def peer_environment() -> dict[str, str]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **VLLM_SETTINGS, **own}


def measure(name: str, python: str, model: Path, workload: Workload) -> list[BatchResult]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        workload.save(folder)
        command = [python, "-m", "benchmarks.peers", name, directory, str(model.resolve())]
        run = subprocess.run(command, env=peer_environment(), capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{name} failed:\n{run.stderr[-4000:]}")
        return [
            BatchResult(each["seconds"], [Answer(**answer) for answer in each["answers"]], each["num_encoded"])
            for each in json.loads((folder / "results.json").read_text())
        ]


if __name__ == "__main__":
    main()
