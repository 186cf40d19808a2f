"""Positions equal those of transformers' Qwen3-VL and Qwen2.5-VL, whichever part of a prompt is asked for."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.models.mrope_positions import MRopePositions
from tests.models.qwen2_5_vl.reference import rope_index
from tests.models.qwen3_vl import reference as ref

# Words before a picture, its rows and columns.
PICTURES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


def reference_places(token_ids: list[int], grids: list[tuple[int, int]]) -> torch.Tensor:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    ids = torch.tensor([token_ids])
    patches = [(1, rows * ref.MERGE_SIZE, columns * ref.MERGE_SIZE) for rows, columns in grids]
    vision = SimpleNamespace(spatial_merge_size=ref.MERGE_SIZE, tokens_per_second=2)
    models: list[Any] = [Qwen3VLModel, Qwen2_5_VLModel]
    found = []
    for model in models:
        holder: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        holder.get_vision_position_ids = partial(model.get_vision_position_ids, holder)
        places, _ = model.get_rope_index(holder, ids, (ids == ref.IMAGE_TOKEN).int(), torch.tensor(patches))
        found.append(places[:, 0])
    assert torch.equal(*found)
    return found[0]  # type: ignore[no-any-return]


@given(pictures=PICTURES, behind=st.integers(1, 6), data=st.data())
def test_positions_are_the_reference_s(pictures: list[tuple[int, int, int]], behind: int, data: st.DataObject) -> None:
    token_ids, media = list[int](), []
    for index, (words, rows, columns) in enumerate(pictures):
        span = TokenSpan(len(token_ids) + words, rows * columns)
        token_ids += [5] * words + [ref.IMAGE_TOKEN] * span.length
        media.append(MediaItem(str(index), span, Geometry(1, 1), columns=columns))
    token_ids += [5] * behind
    expected = reference_places(token_ids, [(rows, columns) for _, rows, columns in pictures])
    places = MRopePositions(media)
    start = data.draw(st.integers(0, len(token_ids) - 1))
    end = data.draw(st.integers(start + 1, len(token_ids)))
    assert torch.equal(places.between(start, end), expected[:, start:end])
    assert len(token_ids) - 1 - places.shift == int(expected[0, -1])


# Words before a film, its moments, their rows and columns, and how many eighths of a second each of them lasts.
FILMS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40)),
    min_size=1,
    max_size=3,
)
PLACES_PER_SECOND = 2


def by_transformers(model: Any, token_ids: list[int], **films: torch.Tensor) -> torch.Tensor:
    vision = SimpleNamespace(spatial_merge_size=ref.MERGE_SIZE, tokens_per_second=PLACES_PER_SECOND)
    holder: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    holder.get_vision_position_ids = partial(model.get_vision_position_ids, holder)
    ids = torch.tensor([token_ids])
    places, _ = model.get_rope_index(holder, ids, 2 * (ids == ref.VIDEO_TOKEN).int(), **films)
    return places[:, 0]  # type: ignore[no-any-return]


@given(films=FILMS, behind=st.integers(1, 6))
def test_films_with_consecutive_moments_have_the_reference_s_positions(
    films: list[tuple[int, int, int, int, int]], behind: int
) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    token_ids, media, long = list[int](), list[MediaItem](), list[TokenSpan]()
    for words, moments, rows, columns, eighths in films:
        token_ids += [5] * (words - 1) + [ref.BEGIN_TOKEN]
        for index in range(moments):
            span, later = TokenSpan(len(token_ids), rows * columns), index * PLACES_PER_SECOND * eighths // 8
            media.append(MediaItem("", span, Geometry(1, 1), "video", index > 0, columns, later if index else None))
            token_ids += [ref.VIDEO_TOKEN] * span.length
        long += [span] if later >= max(rows, columns) else []
        token_ids.append(ref.END_TOKEN)
    token_ids += [5] * behind
    theirs = {
        "video_grid_thw": torch.tensor([(moments, 2 * rows, 2 * columns) for _, moments, rows, columns, _ in films]),
        "second_per_grid_ts": torch.tensor([eighths / 8 for *_, eighths in films]),
    }
    places = MRopePositions(media)
    found = places.between(0, len(token_ids))
    find: Any = partial(rope_index, tokens=ref.TOKENS, merge_size=ref.MERGE_SIZE, places_per_second=PLACES_PER_SECOND)
    expected, shift = find(torch.tensor([token_ids]), **theirs)
    assert torch.equal(found, expected[:, 0])
    assert places.shift == -int(shift)
    # After a film that lasts longer than its sides are, the model's own class starts the text too early.
    agreed = long[0].end if long else len(token_ids)
    assert torch.equal(found[:, :agreed], by_transformers(Qwen2_5_VLModel, token_ids, **theirs)[:, :agreed])


def test_items_without_rows_have_positions_like_text() -> None:
    strip = MediaItem("strip", TokenSpan(2, 3), Geometry(1, 3), "prompt_embeds")
    places = MRopePositions([strip])
    assert places.shift == 0
    assert places.between(0, 8).tolist() == [list(range(8))] * 3
