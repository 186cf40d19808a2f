"""The account of a request in one line: for the log, and for the `Server-Timing` header that browsers display."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from keepsight.observe.account import RequestAccount
from keepsight.observe.catalogue import STAGES, Stage

# The most pictures described in a header: many clients and proxies accept no header of more than 4 or 8 KiB.
MAX_MEDIA = 40


def format_for_log(accounts: Sequence[RequestAccount]) -> str:
    """Return the line for the log; empty if there is nothing to report."""
    answers = [answer for each in accounts for answer in each.answers()]
    pictures = ", ".join(f"{answers.count(each)} {_name(*each)}" for each in dict.fromkeys(answers))
    seconds = _sum_stages(accounts)
    stages = ", ".join(f"{stage} {spent * 1e3:.1f}" for stage, spent in seconds.items())
    parts = {
        "adapter": ", ".join(dict.fromkeys(repr(each.adapter) for each in accounts if each.adapter)),
        "pictures": pictures,
        "ms": stages,
    }
    return "; ".join(f"{name}: {text}" for name, text in parts.items() if text)


def format_for_header(accounts: Sequence[RequestAccount]) -> str:
    """Return e.g. `encode;dur=12.3, media0;desc="encoder.disk"`: https://www.w3.org/TR/server-timing/

    All stages are listed, but only the first `MAX_MEDIA` pictures.
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
