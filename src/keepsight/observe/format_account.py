"""The account of a request in one line: for the log, and for the `Server-Timing` header that browsers display."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from keepsight.media import Modality
from keepsight.observe.account import RequestAccount
from keepsight.observe.catalogue import STAGES, Stage

# The most items described in a header: many clients and proxies accept no header of more than 4 or 8 KiB.
MAX_MEDIA = 40
# What items are called, and what tokens are of.
ITEMS: dict[Modality, str] = {
    "image": "pictures",
    "video": "moments of films",
    "audio": "sounds",
    "image_embeds": "embeddings",
    "prompt_embeds": "embeddings",
}
TOKENS_OF: dict[Modality, str] = {"image": "pictures", "image_embeds": "pictures", "video": "films", "audio": "sounds"}


def format_for_log(accounts: Sequence[RequestAccount]) -> str:
    """Return the line for the log; empty if there is nothing to report."""
    seconds = _sum_stages(accounts)
    stages = ", ".join(f"{stage} {spent * 1e3:.1f}" for stage, spent in seconds.items())
    parts = {
        "adapter": ", ".join(dict.fromkeys(repr(each.adapter) for each in accounts if each.adapter)),
        **_describe_items(accounts),
        "ms": stages,
    }
    return "; ".join(f"{name}: {text}" for name, text in parts.items() if text)


def format_media_tokens(accounts: Sequence[RequestAccount]) -> str:
    """Return e.g. `256 of pictures, 16 of films`."""
    tokens = Counter[str](dict.fromkeys(TOKENS_OF.values(), 0))
    for item in chain.from_iterable(account.media for account in accounts):
        if (kind := TOKENS_OF.get(item.modality)) is not None:
            tokens[kind] += item.num_tokens
    return ", ".join(f"{count} of {kind}" for kind, count in tokens.items() if count) or "0 of pictures"


def _describe_items(accounts: Sequence[RequestAccount]) -> dict[str, str]:
    """Return which caches answered for the items of each kind."""
    answers = defaultdict[str, Counter[str]](Counter)
    for account in accounts:
        for item, answer in zip(account.media, account.answers(), strict=False):  # no answers: there is no token
            answers[ITEMS[item.modality]][_name(*answer)] += 1
    return {items: ", ".join(f"{count} {name}" for name, count in each.items()) for items, each in answers.items()}


def format_for_header(accounts: Sequence[RequestAccount]) -> str:
    """Return e.g. `encode;dur=12.3, media0;desc="encoder.disk"`: https://www.w3.org/TR/server-timing/

    All stages are listed, but only the first `MAX_MEDIA` items.
    """
    stages = [f"{stage};dur={spent * 1e3:.3f}" for stage, spent in _sum_stages(accounts).items()]
    answers = [answer for each in accounts for answer in each.answers()][:MAX_MEDIA]
    return ", ".join(
        [*stages, *(f'media{index};desc="{".".join(filter(None, answer))}"' for index, answer in enumerate(answers))]
    )


def _sum_stages(accounts: Sequence[RequestAccount]) -> dict[Stage, float]:
    """Sum the seconds of each stage over all requests and items, in the order in which stages run."""
    sums = defaultdict[Stage, float](float)
    for span in chain.from_iterable(account.spans for account in accounts):
        sums[span.stage] += span.own_seconds
    return {stage: sums[stage] for stage in STAGES if stage in sums}


def _name(answered_by: str, tier: str | None) -> str:
    if answered_by == "nobody":
        return "made"
    return f"from {answered_by} ({tier})" if answered_by == "encoder" else f"from {answered_by}"
