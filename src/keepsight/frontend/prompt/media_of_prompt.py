"""Media sent with a prompt that the client wrote itself, markers included: which picture each marker stands for."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.read_messages import PicturePart, read_label
from keepsight.media import KINDS, Kind

# Sources by kind, and the uuid of each.
MediaOfPrompt = Mapping[Kind, Sequence[object]]
UuidsOfPrompt = Mapping[Kind, Sequence[object] | None]
NO_MEDIA: MediaOfPrompt = {}
NO_UUIDS: UuidsOfPrompt = {}


def parts_of_prompt(markers: Iterable[Kind], media: MediaOfPrompt, uuids: UuidsOfPrompt) -> list[PicturePart]:
    """Return the parts in the order of the markers. Parts and markers without a counterpart are refused later."""
    left = {kind: iter(_as_parts(media.get(kind, ()), uuids.get(kind), kind)) for kind in KINDS}
    placed = [next(left[kind], None) for kind in markers]
    return [*filter(None, placed), *itertools.chain.from_iterable(left.values())]


def _as_parts(sources: Sequence[object], uuids: Sequence[object] | None, modality: Kind) -> list[PicturePart]:
    data_field, field = f"multi_modal_data.{modality}", f"multi_modal_uuids.{modality}"
    uuids = [None] * len(sources) if uuids is None else uuids
    if len(uuids) != len(sources):
        raise InvalidArgumentError(field, f"holds {len(uuids)} for {len(sources)} of multi_modal_data")
    return [
        _as_part(source, f"{data_field}[{index}]", read_label(uuid, f"{field}[{index}]"), modality)
        for index, (source, uuid) in enumerate(zip(sources, uuids, strict=True))
    ]


def _as_part(source: object, field: str, uuid: str | None, modality: Kind) -> PicturePart:
    if source is None and uuid is None:
        raise InvalidArgumentError(field, "may be None only with a uuid; else it must be a URL, bytes or an object")
    return PicturePart(source, field, uuid, modality=modality)
