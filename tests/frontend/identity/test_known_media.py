"""Names of the same pixels are merged, in whatever order they are learned and forgotten."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepsight.frontend.identity.common_geometries import PLACE_BYTES, PLACES_PER_BUCKET, CommonGeometries
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.media import Excerpt, Geometry, Timeline

CONTENTS = st.sampled_from("abcdefgh")
SIZE = Geometry(40, 30)


def pixels_of(media_hash: str) -> str:
    """Return the pixels of a name: a to d are one picture, e to h another."""
    return "first" if media_hash < "e" else "second"


class KnownMediaMachine(RuleBasedStateMachine):
    @initialize(max_entries=st.integers(1, 9))
    def open(self, max_entries: int) -> None:
        self.known = KnownMedia(max_entries)
        self.learned: set[str] = set()
        self.geometries: dict[str, Geometry] = {}

    @rule(media_hash=CONTENTS)
    def learn(self, media_hash: str) -> None:
        # As requests do: content with a canonical name is made and learned under that name.
        name = self.known.canonical_name(media_hash)
        self.known.learn_pixels(name, pixels_of(media_hash))
        self.learned.add(name)

    @rule(media_hash=CONTENTS)
    def learn_what_was_named_before(self, media_hash: str) -> None:
        self.known.learn_pixels(media_hash, pixels_of(media_hash))
        self.learned.add(media_hash)

    @rule(media_hash=CONTENTS)
    def a_name_is_one_under_which_such_pixels_were_made(self, media_hash: str) -> None:
        name = self.known.canonical_name(media_hash)
        assert name == media_hash or (name in self.learned and pixels_of(name) == pixels_of(media_hash))

    @rule(media_hash=CONTENTS)
    def who_goes_by_another_name_lends_nobody_his_own(self, media_hash: str) -> None:
        name = self.known.canonical_name(media_hash)
        assert self.known.canonical_name(name) == name

    @rule(given_name=CONTENTS, width=st.integers(1, 3))
    def remember(self, given_name: str, width: int) -> None:
        held = self.known.geometry_of(given_name)
        remembered = self.known.remember_geometry(given_name, Geometry(width, 1))
        assert remembered == (held or Geometry(width, 1)) == self.known.geometry_of(given_name)

    @rule(given_name=CONTENTS)
    def forget_if_nothing_was_made(self, given_name: str) -> None:
        held = self.known.geometry_of(given_name)
        self.known.forget_geometry(given_name)
        assert self.known.geometry_of(given_name) in (held, None)

    @rule(given_name=CONTENTS, width=st.integers(1, 3))
    def make(self, given_name: str, width: int) -> None:
        self.known.prove_geometry(given_name, Geometry(width, 1))
        held = self.known.geometry_of(given_name)
        if held == Geometry(width, 1):
            self.known.forget_geometry(given_name)
            assert self.known.geometry_of(given_name) == held

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "known"):
            self.known.check_invariants()


TestKnownMedia = KnownMediaMachine.TestCase


def test_the_least_recently_used_name_is_forgotten_first() -> None:
    known = KnownMedia(max_entries=2)
    for name in "abac":
        known.learn_content(name, Geometry(1, 1))
    assert known.recall_content("a") is not None
    known.learn_content("d", Geometry(1, 1))
    assert [known.recall_content(name) is not None for name in "abcd"] == [True, False, False, True]


def test_later_names_of_the_same_pixels_get_the_first_name() -> None:
    known = KnownMedia()
    assert known.canonical_name("png") == "png"
    for name in ("png", "webp", "array"):
        known.learn_pixels(name, "pixels")
    assert [known.canonical_name(name) for name in ("png", "webp", "array", "other")] == ["png", "png", "png", "other"]


def test_a_name_under_which_nothing_is_left_gives_way_to_the_one_that_was_just_made() -> None:
    known, held = KnownMedia(), {"png"}
    known.is_held = held.__contains__
    for name in ("png", "webp"):
        known.learn_pixels(name, "pixels")
    assert known.canonical_name("webp") == "png"
    held.clear()
    known.learn_pixels("array", "pixels")
    assert {known.canonical_name(name) for name in ("png", "webp", "array")} == {"array"}
    known.check_invariants()


def test_what_is_held_under_its_own_name_alone_goes_by_it_and_so_does_the_other() -> None:
    known, held = KnownMedia(), set[str]()
    known.is_held = held.__contains__
    for name in ("png", "webp"):  # Concurrently: nothing is held under the first name yet.
        known.learn_pixels(name, "pixels")
    held |= {"png", "webp"}
    assert [known.canonical_name(name) for name in ("png", "webp")] == ["webp", "webp"]
    held.remove("webp")
    assert [known.canonical_name(name) for name in ("png", "webp")] == ["png", "png"]
    held.clear()
    assert [known.canonical_name(name) for name in ("webp", "png")] == ["png", "png"]
    known.check_invariants()


def test_a_failed_request_forgets_a_name_until_pixels_were_made_under_it() -> None:
    known = KnownMedia()
    for _ in range(2):
        known.remember_geometry("cat", SIZE)
        known.forget_geometry("cat")
        assert known.geometry_of("cat") is None
    known.remember_geometry("cat", SIZE)
    known.prove_geometry("cat", SIZE)
    known.forget_geometry("cat")
    assert known.geometry_of("cat") == SIZE


def test_a_name_that_was_forgotten_while_its_pixels_were_made_is_known_again(tmp_path: Path) -> None:
    common = CommonGeometries.open(tmp_path)
    known, other = KnownMedia(common=common), KnownMedia(common=common)
    known.remember_geometry("cat", SIZE)
    known.forget_geometry("cat")
    known.prove_geometry("cat", SIZE)
    known.forget_geometry("cat")
    assert known.geometry_of("cat") == other.geometry_of("cat") == SIZE


def test_a_name_that_failed_is_free_for_every_frontend(tmp_path: Path) -> None:
    common = CommonGeometries.open(tmp_path)
    one, two = KnownMedia(common=common), KnownMedia(common=common)
    one.remember_geometry("cat", SIZE)
    assert two.remember_geometry("cat", SIZE) == two.geometry_of("cat") == SIZE
    one.forget_geometry("cat")
    assert two.geometry_of("cat") is None
    assert two.remember_geometry("cat", Geometry(50, 60)) == one.geometry_of("cat") == Geometry(50, 60)


def test_a_name_proven_by_one_frontend_outlives_its_failure_at_another(tmp_path: Path) -> None:
    common = CommonGeometries.open(tmp_path)
    one, two, later = (KnownMedia(common=common) for _ in range(3))
    one.remember_geometry("cat", SIZE)
    two.prove_geometry("cat", SIZE)
    one.forget_geometry("cat")
    assert one.geometry_of("cat") == later.geometry_of("cat") == two.geometry_of("cat") == SIZE


@pytest.mark.parametrize(
    ("is_old_proven", "is_new_proven"), [(True, True), (False, True), (False, False), (True, False)]
)
def test_frontends_go_by_one_size_after_the_common_table_has_lost_a_name(
    is_old_proven: bool, is_new_proven: bool
) -> None:
    page = bytearray(PLACES_PER_BUCKET * PLACE_BYTES)
    one, two, later = (KnownMedia(common=CommonGeometries(page, PLACES_PER_BUCKET)) for _ in range(3))
    new = Geometry(50, 60)
    one.remember_geometry("cat", SIZE)
    if is_old_proven:
        one.prove_geometry("cat", SIZE)
    page[:] = bytes(len(page))
    assert two.remember_geometry("cat", new) == new
    if is_new_proven:
        two.prove_geometry("cat", new)
    expected = SIZE if is_old_proven and not is_new_proven else new
    for _ in range(2):
        assert [each.geometry_of("cat") for each in (one, two, later)] == [expected] * 3
    one.prove_geometry("cat", SIZE)
    two.prove_geometry("cat", new)
    assert [each.geometry_of("cat") for each in (one, two, later)] == [expected] * 3
    one.check_invariants()


def test_frames_chosen_from_a_film_are_known_whole_or_not_at_all(tmp_path: Path) -> None:
    common = CommonGeometries.open(tmp_path)
    one, two = KnownMedia(common=common), KnownMedia(common=common)
    chosen = Geometry(40, 30, Timeline(2, 24.0, Excerpt((0, 90), 100)))
    one.remember_geometry("film", chosen)
    one.prove_geometry("film", chosen)
    assert (one.geometry_of("film"), two.geometry_of("film")) == (chosen, None)


def test_pixels_of_another_size_prove_nothing() -> None:
    known = KnownMedia()
    known.remember_geometry("cat", SIZE)
    known.prove_geometry("cat", Geometry(30, 40))
    assert known.geometry_of("cat") == SIZE
    known.forget_geometry("cat")
    assert known.geometry_of("cat") is None


def test_recently_used_names_are_remembered_longest() -> None:
    known = KnownMedia(max_entries=2)
    for given_name in ("old", "new"):
        known.remember_geometry(given_name, Geometry(1, 1))
    assert known.geometry_of("old")
    known.remember_geometry("newest", Geometry(1, 1))
    assert known.geometry_of("new") is None
    assert known.geometry_of("old")


def test_a_name_whose_pixels_vary_lends_itself_to_nobody_else() -> None:
    known = KnownMedia()
    known.learn_pixels("odd", "pixels")
    known.learn_pixels("odd", "other pixels")
    known.learn_pixels("honest", "other pixels")
    assert known.canonical_name("honest") == "honest"
    known.check_invariants()


@given(st.lists(CONTENTS, max_size=30))
def test_threads_that_learn_at_once_agree_on_a_name(names: list[str]) -> None:
    known = KnownMedia()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: known.learn_pixels(name, "pixels"), names))
    known.check_invariants()
    assert len({known.canonical_name(name) for name in names}) <= 1
