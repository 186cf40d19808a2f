"""`keepsight cache inspect|verify|clear|warm`: the entries of a disk tier or a Redis server, no matter who wrote them.

Invariant: inspecting never evicts an entry, and never creates a tier where there was none; `verify` removes only
damaged entries, `clear` all.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from keepsight.cli.add_command import Commands, add_command
from keepsight.cli.end_on_ctrl_c import ending_on_ctrl_c
from keepsight.cli.model_arguments import add_model, add_model_arguments, config_from
from keepsight.cli.read_picture import read_picture
from keepsight.errors import InvalidArgumentError, TierError
from keepsight.tiers.disk_place import parse_disk_place
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.pins import pins_in
from keepsight.tiers.redis_address import parse_address
from keepsight.tiers.redis_tier import RedisTier

MIB = 2**20
# Used whatever the budget of the servers that fill the tier: inspecting must not evict anything.
_NO_BUDGET = 2**62
FarTier = DiskTier | RedisTier
_SUMMARIES = {
    "inspect": "show how many entries are kept, their size, and how many are pinned",
    "verify": "read all entries, and remove damaged ones",
    "clear": "remove all entries, including pinned ones and those of other servers that share the place",
}


def add_commands(commands: Commands) -> None:
    for name, summary in _SUMMARIES.items():
        command = add_command(commands, name, summary)
        place = command.add_mutually_exclusive_group()
        help_text = "folder of embeddings or prompts (default: ~/.cache/keepsight/embeddings)"
        place.add_argument("--disk", default=True, metavar="PATH", help=help_text)
        place.add_argument("--remote", metavar="URL", help="server that speaks Redis's protocol, in place of a folder")
        if name == "inspect":
            command.add_argument(
                "--keys", action="store_true", help="print a line for each entry: key, bytes, whether pinned"
            )
    summary = "encode pictures in advance for a server with the same flags"
    warm = add_command(commands, "warm", summary)
    warm.add_argument(
        "pictures", nargs="+", type=Path, metavar="PICTURE", help="picture as it will be sent, byte for byte"
    )
    add_server_flags(warm)


def add_server_flags(command: argparse.ArgumentParser) -> None:
    add_model(command)
    add_model_arguments(command)


def run(arguments: argparse.Namespace) -> int:
    if arguments.cache_command == "warm":
        return _warm(arguments)
    lines, status = _act_on_place(arguments)
    # Outside of `naming_tier_faults`: a closed output is no fault of the tier.
    print(*lines, sep="\n")
    return status


def _act_on_place(arguments: argparse.Namespace) -> tuple[list[str], int]:
    pins: Iterable[str] = ()  # only a folder has any
    if arguments.remote is not None:
        opened = _opened_server(arguments.remote, "--remote")
    else:
        directory = parse_disk_place(arguments.disk, "--disk").directory
        if not holds_any(directory, "--disk"):
            return [f"nothing is kept in {directory}"], 0
        opened, pins = opened_folder(directory, "--disk"), pins_in(directory)
    with opened as tier:
        if arguments.cache_command == "inspect":
            return _inspect(tier, frozenset(pins), arguments.keys), 0
        return {"verify": _verify, "clear": _clear}[arguments.cache_command](tier)


def holds_any(directory: Path, field: str) -> bool:
    with naming_tier_faults(field, str(directory)):
        return DiskTier.is_in(directory)


@contextmanager
def opened_folder(directory: Path, field: str) -> Iterator[FarTier]:
    with closing(DiskTier(directory, _NO_BUDGET)) as tier, naming_tier_faults(field, str(directory)):
        yield tier


@contextmanager
def _opened_server(url: str, field: str) -> Iterator[FarTier]:
    # A parsed address does not show the password.
    place = str(parse_address(url, field))
    with closing(RedisTier(url)) as tier, naming_tier_faults(field, place):
        yield tier


@contextmanager
def naming_tier_faults(field: str, place: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TierError) as error:
        raise InvalidArgumentError(field, f"{place} cannot be used: {error}") from error


def _summarize(sizes: Mapping[str, int]) -> str:
    return f"{len(sizes)} entries, {sum(sizes.values()) / MIB:.1f} MiB"


def _inspect(tier: FarTier, pinned: frozenset[str], lists_keys: bool) -> list[str]:
    sizes = tier.list_sizes()
    summary = _summarize(sizes)
    if pinned:
        held = sizes.keys() & pinned
        summary += f"; {len(held)} pinned, {sum(sizes[key] for key in held) / MIB:.1f} MiB"
    if missing := len(pinned - sizes.keys()):
        summary += f"; {missing} pinned but missing"
    keys = sorted(sizes) if lists_keys else []
    return [summary, *(f"{key} {sizes[key]}{' pinned' if key in pinned else ''}" for key in keys)]


def _verify(tier: FarTier) -> tuple[list[str], int]:
    sizes = tier.list_sizes()
    num_damaged = sum(not tier.verify(key) for key in sizes)
    summary = f"{len(sizes)} entries read, {num_damaged} of them damaged"
    return [summary], 1 if num_damaged else 0


def _clear(tier: FarTier) -> tuple[list[str], int]:
    before = tier.list_sizes()
    tier.clear()
    # A folder may be read-only; entries that a server has stored since do not count.
    num_left = len(before.keys() & tier.list_sizes().keys())
    summary = f"{len(before) - num_left} entries removed"
    return ([f"{summary}, {num_left} could not be"], 1) if num_left else ([summary], 0)


def _warm(arguments: argparse.Namespace) -> int:
    """Encode pictures by asking about each; those already kept are not encoded again."""
    if arguments.encoder_disk_cache is None and arguments.encoder_remote_cache is None:
        arguments.encoder_disk_cache = True
    # A prompt found in the prefix cache would make it unnecessary to encode its picture.
    arguments.prefix_disk_cache = None
    config = config_from(arguments)
    pictures = {str(path): read_picture(path, "PICTURE") for path in arguments.pictures}
    # Fail before the model is loaded if its embeddings could not be stored.
    for place in _far_tiers(arguments):
        with place as far_tier:
            far_tier.open()

    with ending_on_ctrl_c():
        from keepsight.cli.name_entries import name_entries
        from keepsight.llm import LLM  # after all checks that do not need torch
        from keepsight.sampling_params import SamplingParams

    with LLM.from_config(config) as llm:
        shown = [{"type": "image_pil", "image_pil": each} for each in pictures.values()]
        conversations = [[{"role": "user", "content": [each]}] for each in shown]
        with _naming_picture(list(pictures)):
            llm.chat(conversations, SamplingParams(temperature=0, max_tokens=1))
    return _report_kept(arguments, name_entries(config, pictures))


@contextmanager
def _naming_picture(names: Sequence[str]) -> Iterator[None]:
    """Report errors found only by decoding under the picture's file name, too; each conversation has one picture."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.item is None:
            raise
        raise type(error)(names[error.item], error.message) from error


def _report_kept(arguments: argparse.Namespace, keys: Mapping[str, Sequence[str]]) -> int:
    """Report what each tier keeps. Return 1 if it lacks a picture: a server works without tiers, warming does not."""
    status = 0
    for place in _far_tiers(arguments):
        with place as tier:
            summary = _summarize(tier.list_sizes())
            lacking = [picture for picture, needed in keys.items() if any(tier.get(key) is None for key in needed)]
        print(f"{tier.name}: {summary}", *(f"{each} is not kept by the {tier.name} tier" for each in lacking), sep="\n")
        status = 1 if lacking else status
    return status


def _far_tiers(arguments: argparse.Namespace) -> Iterator[AbstractContextManager[FarTier]]:
    if arguments.encoder_disk_cache is not None:
        place = parse_disk_place(arguments.encoder_disk_cache)
        yield opened_folder(place.directory, "--encoder-disk-cache")
    if (url := arguments.encoder_remote_cache) is not None:
        yield _opened_server(url, "--encoder-remote-cache")
