"""`keepsight cache pin|unpin`: exempt entries of a disk tier from eviction, also while servers use the tier.

Invariant: an entry that `pin` reports was still there after its pin was set, so no process that shares the folder
evicts it.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from keepsight.cli.add_command import Commands, add_command
from keepsight.cli.cache_contents import MIB, add_server_flags, holds_any, naming_tier_faults, opened_folder
from keepsight.cli.end_on_ctrl_c import ending_on_ctrl_c
from keepsight.cli.model_arguments import config_from
from keepsight.cli.read_picture import read_picture
from keepsight.errors import InvalidArgumentError
from keepsight.tiers.disk_place import DiskPlace, parse_disk_place
from keepsight.tiers.entry_key import is_entry_key
from keepsight.tiers.pins import pins_in

COMMANDS = {
    "pin": "keep pictures' embeddings in the disk tier until they are unpinned, whatever its policy says",
    "unpin": "let pictures' embeddings be evicted again when room is needed",
}
_DESCRIPTION = (
    "Pictures are found by the flags of their server, which may be running. Only a folder has pins: a Redis server "
    "evicts by its own policy, and host memory ends with its server."
)


def add_commands(commands: Commands) -> None:
    for name, summary in COMMANDS.items():
        command = add_command(commands, name, summary, _DESCRIPTION)
        names = "a picture as it is sent, byte for byte, or a key as `inspect --keys` prints it"
        command.add_argument("names", nargs="+" if name == "pin" else "*", metavar="PICTURE|KEY", help=names)
        if name == "unpin":
            command.add_argument("--all", action="store_true", help="unpin everything in the folder")
        add_server_flags(command)


def run(arguments: argparse.Namespace) -> int:
    if arguments.encoder_disk_cache is None:
        if arguments.encoder_remote_cache is not None:
            raise InvalidArgumentError("--encoder-remote-cache", "has no pins: a Redis server evicts by its own policy")
        arguments.encoder_disk_cache = True
    place = parse_disk_place(arguments.encoder_disk_cache)
    return (_pin if arguments.cache_command == "pin" else _unpin)(arguments, place)


def _pin(arguments: argparse.Namespace, place: DiskPlace) -> int:
    if not holds_any(place.directory, "--encoder-disk-cache"):
        raise InvalidArgumentError("--encoder-disk-cache", f"nothing is kept in {place.directory}")
    keys, pins = _find_keys(arguments), pins_in(place.directory)
    with opened_folder(place.directory, "--encoder-disk-cache") as tier:
        tier.open()  # A refused folder is left as it was.
        new = set(chain.from_iterable(keys.values())).difference(pins)
        pins.add(*new)
        try:
            # Waits for any eviction in progress that has not seen the new pins.
            sizes = tier.list_sizes()
            _check_are_kept(keys, sizes, place)
            num_bytes = sum(sizes.get(key, 0) for key in pins)
            _check_have_room(num_bytes, place)
        except BaseException:
            pins.remove(*new)
            raise
    print(f"{len(new)} embeddings pinned; all pinned take {num_bytes / MIB:.1f} of {place.max_bytes / MIB:.1f} MiB")
    return 0


def _check_are_kept(keys: Mapping[str, Sequence[str]], sizes: Mapping[str, int], place: DiskPlace) -> None:
    for name, picture_keys in keys.items():
        if not all(key in sizes for key in picture_keys):
            advice = "`keepsight cache warm` with the same flags puts it there"
            raise InvalidArgumentError("PICTURE|KEY", f"{name} is not kept in {place.directory}; {advice}")


def _check_have_room(num_bytes: int, place: DiskPlace) -> None:
    if num_bytes > place.max_bytes:
        reason = (
            f"would hold {num_bytes} bytes of pinned embeddings, more than its limit of {place.max_bytes} (PATH:SIZE)"
        )
        raise InvalidArgumentError("--encoder-disk-cache", f"{place.directory} {reason}")


def _unpin(arguments: argparse.Namespace, place: DiskPlace) -> int:
    if bool(arguments.names) == arguments.all:
        raise InvalidArgumentError("PICTURE|KEY", "name what to unpin, or use --all")
    named = set(chain.from_iterable(_find_keys(arguments).values()))
    pins = pins_in(place.directory)
    with naming_tier_faults("--encoder-disk-cache", str(place.directory)):
        keys = [key for key in pins if arguments.all or key in named]
        pins.remove(*keys)
    print(f"{len(keys)} embeddings unpinned")
    return 0


def _find_keys(arguments: argparse.Namespace) -> dict[str, Sequence[str]]:
    """Return the entry keys for each name on the command line."""
    keys: dict[str, Sequence[str]] = {name: [name] for name in arguments.names if is_entry_key(name)}
    pictures = {name: read_picture(Path(name), "PICTURE") for name in arguments.names if name not in keys}
    if not pictures:
        return keys
    config = config_from(arguments)

    with ending_on_ctrl_c():
        from keepsight.cli.name_entries import name_entries  # imports torch, which keys do not need

    return {**keys, **name_entries(config, pictures)}
