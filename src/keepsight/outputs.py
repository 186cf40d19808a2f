"""Return values of `LLM`, in vLLM's shapes, with lists where its users expect to add and compare lists.

Each belongs to its caller, who may modify it, as with vLLM.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    # The stop string or token id that ended the answer, None for the end-of-sequence token.
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    # For each token: the sampled one and the most likely ones, by id.
    logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    # Number of prompt tokens whose keys and values were found in the prefix cache.
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    # Number of prompt tokens whose keys and values were found in the prefix cache.
    num_cached_tokens: int = 0
    # For each token of the prompt: itself and the most likely ones in its place, by id; None for the first.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
