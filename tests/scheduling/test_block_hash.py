"""Equal hashes mean equal keys and values: one test for each thing they depend on, and one for all together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import Adapter, EngineRequest
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.block_hash import BlockHasher, ExtraKey, count_common, extra_keys_by_block
from tests.scheduling.long_run import thorough

PICTURE_TOKEN = 7


def picture(media_hash: str, start: int, length: int) -> MediaItem:
    return MediaItem(media_hash, TokenSpan(start, length), Geometry(8, 8))


def film(*places: int | None) -> EngineRequest:
    """A film whose moments take one block each, followed by a block of text."""
    moments = [replace(picture("moment", 16 * index, 16), rotary_offset=own) for index, own in enumerate(places)]
    return request(16 * len(places) + 16, *moments)


def embedded(num_tokens: int, *strips: tuple[str, int], cache_salt: str | None = None) -> EngineRequest:
    """A prompt made only of strips of embeddings, each given by name and length."""
    media, start = [], 0
    for media_hash, length in strips:
        media.append(MediaItem(media_hash, TokenSpan(start, length), Geometry(8, length), "prompt_embeds"))
        start += length
    return request(num_tokens, *media, token_ids=(0,) * num_tokens, cache_salt=cache_salt)


def request(
    num_tokens: int = 64,
    *media: MediaItem,
    token_ids: tuple[int, ...] | None = None,
    cache_salt: str | None = None,
    adapter: Adapter | None = None,
) -> EngineRequest:
    if token_ids is None:
        token_ids = tuple(
            PICTURE_TOKEN if any(position in item.span for item in media) else 100 + position
            for position in range(num_tokens)
        )
    return EngineRequest("request", token_ids, media, SamplingParams(), cache_salt=cache_salt, adapter=adapter)


def hashes(of: EngineRequest, block_size: int = 16) -> list[bytes]:
    return BlockHasher(of, block_size).hashes


def num_shared_blocks(left: EngineRequest, right: EngineRequest) -> int:
    """Return the number of equal blocks; they must be the first ones."""
    equal = [a == b for a, b in zip(hashes(left), hashes(right), strict=True)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


class TestExtraKeys:
    def test_a_picture_that_crosses_a_block_s_edge_is_in_both_at_its_distance_from_their_starts(self) -> None:
        of = request(48, picture("aaa", 11, 10))
        assert extra_keys_by_block(of, 16) == {0: [("mm", "aaa", 11)], 1: [("mm", "aaa", -5)]}

    def test_a_picture_that_ends_with_a_block_is_not_in_the_next(self) -> None:
        of = request(48, picture("aaa", 16, 16))
        assert extra_keys_by_block(of, 16) == {1: [("mm", "aaa", 0)]}

    def test_adapter_and_salt_are_in_the_first_block_only_around_its_pictures(self) -> None:
        of = request(48, picture("aaa", 1, 3), cache_salt="salt", adapter=Adapter("name", "digest"))
        keys = [("lora", "name", "digest"), ("mm", "aaa", 1), ("cache_salt", "salt")]
        assert extra_keys_by_block(of, 16) == {0: keys}

    def test_all_pictures_of_a_block_are_named_in_the_order_of_their_places(self) -> None:
        of = request(16, picture("bbb", 1, 3), picture("aaa", 5, 3))
        assert extra_keys_by_block(of, 16) == {0: [("mm", "bbb", 1), ("mm", "aaa", 5)]}

    def test_the_strips_of_an_embedded_prompt_are_named_wherever_they_lie(self) -> None:
        of = embedded(48, ("aaa", 20), ("bbb", 28), cache_salt="salt")
        assert extra_keys_by_block(of, 16) == {
            0: [("prompt_embeds", "aaa"), ("cache_salt", "salt")],
            1: [("prompt_embeds", "aaa"), ("prompt_embeds", "bbb")],
            2: [("prompt_embeds", "bbb")],
        }
        assert [BlockHasher(of, 16).name_of(block).media for block in range(3)] == [("aaa",), ("aaa", "bbb"), ("bbb",)]


class TestSharing:
    def test_equal_embeddings_share_all_blocks_and_others_none_from_the_first_other_strip_on(self) -> None:
        of = embedded(64, ("aaa", 20), ("bbb", 20), ("ccc", 24))
        assert num_shared_blocks(of, embedded(64, ("aaa", 20), ("bbb", 20), ("ccc", 24))) == 4
        assert num_shared_blocks(of, embedded(64, ("aaa", 20), ("bbb", 20), ("ddd", 24))) == 2
        assert num_shared_blocks(of, embedded(64, ("aaa", 20), ("ddd", 20), ("ccc", 24))) == 1
        assert num_shared_blocks(of, embedded(64, ("bbb", 20), ("aaa", 20), ("ccc", 24))) == 0
        assert num_shared_blocks(of, embedded(64, ("aaa", 20), ("bbb", 20), ("ccc", 24), cache_salt="salt")) == 0

    def test_embeddings_share_nothing_with_the_tokens_that_hold_their_places_nor_with_a_picture(self) -> None:
        assert num_shared_blocks(embedded(32, ("aaa", 32)), request(token_ids=(0,) * 32)) == 0
        assert (
            num_shared_blocks(embedded(32, ("aaa", 32)), request(32, picture("aaa", 0, 32), token_ids=(0,) * 32)) == 0
        )

    def test_equal_requests_share_all_blocks(self) -> None:
        assert num_shared_blocks(request(64, picture("aaa", 20, 9)), request(64, picture("aaa", 20, 9))) == 4

    def test_another_token_ends_the_shared_part_for_good(self) -> None:
        tokens = tuple(range(64))
        assert num_shared_blocks(request(token_ids=tokens), request(token_ids=(*tokens[:20], 9, *tokens[21:]))) == 1

    def test_same_text_with_another_picture_shares_nothing_from_the_picture_on(self) -> None:
        assert num_shared_blocks(request(64, picture("aaa", 33, 9)), request(64, picture("bbb", 33, 9))) == 2

    def test_pictures_in_the_other_order_share_nothing_from_the_first_one_on(self) -> None:
        left = request(64, picture("aaa", 17, 4), picture("bbb", 40, 4))
        right = request(64, picture("bbb", 17, 4), picture("aaa", 40, 4))
        assert num_shared_blocks(left, right) == 1

    def test_pictures_in_the_other_order_within_one_block_share_nothing(self) -> None:
        left = request(64, picture("aaa", 2, 4), picture("bbb", 8, 4))
        right = request(64, picture("bbb", 2, 4), picture("aaa", 8, 4))
        assert num_shared_blocks(left, right) == 0

    def test_one_picture_at_another_place_among_the_same_tokens_shares_nothing(self) -> None:
        tokens = (PICTURE_TOKEN,) * 64
        left = request(64, picture("aaa", 2, 4), token_ids=tokens)
        assert num_shared_blocks(left, request(64, picture("aaa", 3, 4), token_ids=tokens)) == 0

    def test_two_pictures_at_other_places_among_the_same_tokens_share_nothing_from_there_on(self) -> None:
        tokens = (PICTURE_TOKEN,) * 64
        left = request(64, picture("aaa", 2, 4), picture("bbb", 20, 4), token_ids=tokens)
        right = request(64, picture("aaa", 2, 4), picture("bbb", 24, 4), token_ids=tokens)
        assert num_shared_blocks(left, right) == 1

    def test_a_film_that_shows_the_same_at_other_times_shares_nothing_from_the_first_other_time_on(self) -> None:
        assert num_shared_blocks(film(None, 2, 4), film(None, 2, 4)) == 4
        assert num_shared_blocks(film(None, 2, 4), film(None, 2, 5)) == 2
        assert num_shared_blocks(film(None, 2, 4), film(None, 1, 2)) == 1

    def test_the_first_moment_of_a_film_differs_from_one_that_continues_a_film(self) -> None:
        assert num_shared_blocks(film(None, 0), film(None, None)) == 1

    def test_a_shared_part_may_end_inside_a_picture(self) -> None:
        left, right = request(64, picture("aaa", 10, 40)), request(96, picture("aaa", 10, 40))
        assert hashes(left)[:3] == hashes(right)[:3]
        assert TokenSpan(10, 40).is_cut_by(3 * 16)

    @pytest.mark.parametrize("other", [None, "", "b"])
    def test_tenants_share_nothing(self, other: str | None) -> None:
        assert num_shared_blocks(request(cache_salt="a"), request(cache_salt=other)) == 0

    @pytest.mark.parametrize("other", [None, Adapter("b", "x"), Adapter("a", "y"), Adapter("ax", "")])
    def test_adapters_share_nothing_even_under_one_name(self, other: Adapter | None) -> None:
        assert num_shared_blocks(request(adapter=Adapter("a", "x")), request(adapter=other)) == 0

    def test_an_adapter_s_name_cannot_pretend_to_be_a_salt(self) -> None:
        assert num_shared_blocks(request(adapter=Adapter("cache_salt", "a")), request(cache_salt="a")) == 0

    def test_half_a_surrogate_pair_is_a_valid_salt(self) -> None:
        assert num_shared_blocks(request(cache_salt="\ud800"), request(cache_salt="\ud801")) == 0

    def test_blocks_of_another_size_share_nothing(self) -> None:
        of = request(64)
        assert not {*hashes(of, 16)} & {*hashes(of, 32)}


class TestBeginnings:
    """Partial matches of two first blocks of 16 tokens."""

    def num_common(self, left: EngineRequest, right: EngineRequest) -> int:
        first, second = (BlockHasher(of, 16).name_of(0) for of in (left, right))
        assert first.parent == second.parent
        num_common = count_common(first.content, second.content)
        assert num_common == count_common(second.content, first.content)
        return num_common

    @pytest.mark.parametrize(("length", "num_common"), [(16, 16), (48, 16), (10, 10), (1, 1)])
    def test_one_request_may_be_shorter(self, length: int, num_common: int) -> None:
        assert self.num_common(request(32), request(length)) == num_common
        # Zero is a token like any other.
        zeros = [request(token_ids=(0,) * each) for each in (32, length)]
        assert self.num_common(*zeros) == num_common

    def test_texts_match_up_to_the_first_different_token(self) -> None:
        left = request(token_ids=(*range(7), *range(9)))
        assert self.num_common(left, request(token_ids=(*range(7), *range(3, 12)))) == 7
        assert self.num_common(left, request(token_ids=tuple(range(100, 116)))) == 0

    def test_another_picture_ends_the_match_where_the_picture_begins(self) -> None:
        tokens = (PICTURE_TOKEN,) * 32
        left = request(32, picture("aaa", 5, 4), token_ids=tokens)
        assert self.num_common(left, request(32, picture("bbb", 5, 4), token_ids=tokens)) == 5
        assert self.num_common(left, request(32, picture("aaa", 6, 4), token_ids=tokens)) == 5
        assert self.num_common(left, request(32, token_ids=tokens)) == 5

    def test_texts_may_match_further_after_the_same_picture(self) -> None:
        left, right = (request(0, picture("aaa", 2, 9), token_ids=(9,) * 13 + (last,) * 3) for last in (1, 2))
        assert self.num_common(left, right) == 13

    @pytest.mark.parametrize("other", [None, "", "b"])
    def test_tenants_share_no_token(self, other: str | None) -> None:
        assert self.num_common(request(cache_salt="a"), request(cache_salt=other)) == 0

    @pytest.mark.parametrize("other", [None, Adapter("b", "x"), Adapter("a", "y")])
    def test_adapters_share_no_token(self, other: Adapter | None) -> None:
        assert self.num_common(request(adapter=Adapter("a", "x")), request(adapter=other)) == 0

    def test_different_pictures_that_began_before_the_block_share_nothing(self) -> None:
        left, right = (request(48, picture(name, 11, 10)) for name in ("aaa", "bbb"))
        contents = [BlockHasher(of, 16).name_of(1).content for of in (left, right)]
        assert count_common(*contents) == 0


class TestBlockHasher:
    def test_only_full_blocks_have_a_hash(self) -> None:
        hasher = BlockHasher(request(31), 16)
        assert len(hasher.hashes) == 1
        hasher.extend([5])
        assert len(hasher.hashes) == 2

    def test_a_partly_known_last_block_has_a_name(self) -> None:
        hasher = BlockHasher(request(20), 16)
        last = hasher.name_of(1)
        hasher.extend([5])
        assert hasher.name_of(1).block_hash != last.block_hash
        assert hasher.name_of(1).parent == last.parent == hasher.name_of(0).block_hash
        hasher.extend(range(11))
        assert hasher.name_of(1).block_hash == hasher.hashes[1]

    def test_hashes_are_whole_digests(self) -> None:
        assert {len(block_hash) for block_hash in hashes(request(64))} == {32}

    def test_a_picture_beyond_the_known_tokens_is_in_its_block_once_that_is_full(self) -> None:
        whole = request(48, picture("aaa", 20, 20))
        hasher = BlockHasher(replace(whole, token_ids=whole.token_ids[:18]), 16)
        hasher.extend(whole.token_ids[18:])
        assert hasher.hashes == hashes(whole)

    @thorough(40)
    @given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9)), st.integers(1, 5))
    def test_tokens_may_come_in_any_portions(self, portions: list[list[int]], block_size: int) -> None:
        hasher = BlockHasher(request(token_ids=()), block_size)
        for portion in portions:
            hasher.extend(portion)
        whole = tuple(token_id for portion in portions for token_id in portion)
        assert hasher.hashes == hashes(request(token_ids=whole), block_size)


BLOCK = 4


@st.composite
def small_requests(draw: st.DrawFn) -> EngineRequest:
    """Few values, so that two requests are often equal or nearly equal."""
    token_ids = tuple(draw(st.lists(st.sampled_from([0, 1]), min_size=4 * BLOCK, max_size=4 * BLOCK)))
    media: list[MediaItem] = []
    while (start := (media[-1].span.end if media else 0) + draw(st.integers(0, 6))) < 3 * BLOCK:
        shown = picture(draw(st.sampled_from(["a", "b"])), start, draw(st.integers(1, 7)))
        media.append(replace(shown, rotary_offset=draw(st.sampled_from([None, None, 0, 1]))))
    adapter = draw(st.sampled_from([None, None, Adapter("a", "bc"), Adapter("ab", "c")]))
    return request(
        0, *media, token_ids=token_ids, cache_salt=draw(st.sampled_from([None, None, "a", "ab"])), adapter=adapter
    )


@st.composite
def alike_requests(draw: st.DrawFn) -> tuple[EngineRequest, EngineRequest]:
    """Two requests that differ only in some of their parts."""
    left, right = draw(small_requests()), draw(small_requests())
    taken = draw(st.sets(st.sampled_from(["token_ids", "media", "cache_salt", "adapter"])))
    return left, replace(left, **{name: getattr(right, name) for name in taken})


def naive_keys(of: EngineRequest, block_start: int) -> tuple[ExtraKey, ...]:
    keys: list[ExtraKey] = []
    if of.adapter and block_start == 0:
        keys.append(("lora", of.adapter.name, of.adapter.digest))
    block = TokenSpan(block_start, BLOCK)
    for item in of.media:
        if item.span.overlaps(block):
            later = [] if item.rotary_offset is None else [item.rotary_offset]
            keys.append(("mm", item.media_hash, item.span.start - block_start, *later))
    if of.cache_salt is not None and block_start == 0:
        keys.append(("cache_salt", of.cache_salt))
    return tuple(keys)


@thorough(200)
@given(small_requests())
def test_the_extra_keys_of_a_block_are_those_of_all_media_that_overlap_it(of: EngineRequest) -> None:
    keys = extra_keys_by_block(of, BLOCK)
    for start in range(0, len(of.token_ids), BLOCK):
        assert tuple(keys.get(start // BLOCK, ())) == naive_keys(of, start)


@thorough(300)
@given(alike_requests())
def test_two_blocks_have_one_hash_exactly_if_all_that_they_depend_on_is_equal(
    pair: tuple[EngineRequest, EngineRequest],
) -> None:
    def names(of: EngineRequest) -> list[object]:
        starts = range(0, len(of.token_ids), BLOCK)
        return [
            (of.token_ids[: end + BLOCK], *(naive_keys(of, start) for start in starts if start <= end))
            for end in starts
        ]

    left, right = pair
    for left_name, left_hash in zip(names(left), hashes(left, BLOCK), strict=True):
        for right_name, right_hash in zip(names(right), hashes(right, BLOCK), strict=True):
            assert (left_name == right_name) == (left_hash == right_hash)


@thorough(200)
@given(small_requests())
def test_a_hasher_knows_which_media_lie_in_each_block(of: EngineRequest) -> None:
    hasher = BlockHasher(of, BLOCK)
    for block in range(len(hasher.hashes)):
        assert hasher.name_of(block).media == tuple(
            str(key[1]) for key in naive_keys(of, block * BLOCK) if key[0] == "mm"
        )
        # The beginning of a block does not name its media: the blocks before it do.
        assert hasher.name_of(block, BLOCK - 1).media == ()


@thorough(300)
@given(alike_requests(), st.integers(0, 4 * BLOCK), st.integers(-1, 1))
def test_two_prompts_have_one_end_exactly_if_all_that_they_depend_on_is_equal(
    pair: tuple[EngineRequest, EngineRequest], length: int, difference: int
) -> None:
    def cut(of: EngineRequest, num_tokens: int) -> EngineRequest:
        media = tuple(item for item in of.media if item.span.start < num_tokens)
        return replace(of, token_ids=of.token_ids[: max(0, num_tokens)], media=media)

    def name(of: EngineRequest) -> object:
        end = max([len(of.token_ids), 1, *(item.span.end for item in of.media)])
        return of.token_ids, [naive_keys(of, start) for start in range(0, end, BLOCK)]

    left, right = cut(pair[0], length), cut(pair[1], length + difference)
    ends = [BlockHasher(each, BLOCK).prompt_end for each in (left, right)]
    # A picture beyond the last block of tokens is not part of a prompt's end.
    if all(item.span.end <= len(each.token_ids) for each in (left, right) for item in each.media):
        assert (name(left) == name(right)) == (ends[0] == ends[1])
    assert not {*ends} & {*hashes(left, BLOCK), *hashes(right, BLOCK)}


@thorough(300)
@given(alike_requests())
def test_two_blocks_behind_the_same_have_so_many_tokens_in_common_as_depend_on_the_same(
    pair: tuple[EngineRequest, EngineRequest],
) -> None:
    def depends_on(of: EngineRequest, position: int) -> object:
        """An item counts in full from its first token in the block on."""
        reached = [item for item in of.media if item.span.start <= position and item.span.end > start]
        places = [(item.media_hash, item.span.start, item.rotary_offset) for item in reached]
        return of.token_ids[position], places, of.cache_salt, of.adapter

    left, right = pair
    hashers = [BlockHasher(of, BLOCK) for of in pair]
    for block in range(len(hashers[0].hashes)):
        first, second = (hasher.name_of(block) for hasher in hashers)
        if first.parent != second.parent:
            break
        start = block * BLOCK
        same = [depends_on(left, place) == depends_on(right, place) for place in range(start, start + BLOCK)]
        assert count_common(first.content, second.content) == [*same, False].index(False)
