"""Measures `LLM` on a workload that is submitted all at once, as by a batch job."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepsight.bench.workloads import Conversation, WorkloadOptions, draw_workload
from keepsight.llm import LLM
from keepsight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineResult:
    seconds: float
    num_requests: int
    num_pictures: int
    num_tokens: int
    # The share of the prompts' tokens that was cached.
    cached_share: float

    def describe(self) -> str:
        rates = {"requests": self.num_requests, "pictures": self.num_pictures, "output tokens": self.num_tokens}
        counts = [f"{count} {name} ({count / self.seconds:.2f}/s)" for name, count in rates.items()]
        return f"{', '.join(counts)} in {self.seconds:.2f} s; {self.cached_share:.0%} of the prompts cached"


def measure_offline(llm: LLM, name: str, options: WorkloadOptions, params: SamplingParams) -> OfflineResult:
    workload = draw_workload(name, options)
    before, timed = _messages_of(workload.before), _messages_of(list(workload.timed))
    if before:
        llm.chat(before, params, use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.chat(timed, params)
    seconds = time.perf_counter() - started
    return OfflineResult(
        seconds,
        len(timed),
        sum(part["type"] == "image_url" for [message] in timed for part in message["content"]),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs) / sum(len(output.prompt_token_ids) for output in outputs),
    )


def _messages_of(conversations: Sequence[Conversation]) -> list[list[dict[str, Any]]]:
    return [
        [{"role": "user", "content": [json.loads(part) for part in turn]} for turn in each.turns]
        for each in conversations
    ]
