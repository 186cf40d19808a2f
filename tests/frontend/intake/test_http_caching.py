import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.frontend.intake.http_caching import MAX_SECONDS, Freshness, Validators, read_freshness, read_validators


def freshness_of(**headers: str) -> Freshness:
    return read_freshness([(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()])


@pytest.mark.parametrize(
    ("cache_control", "freshness"),
    [
        ("max-age=60", Freshness(60)),
        ("public, Max-Age=60", Freshness(60)),
        ('max-age="60"', Freshness(60)),
        # Requests carry only the URL, so the response is the same for every client.
        ("private, max-age=60", Freshness(60)),
        ("s-maxage=60", Freshness(0)),
        ("max-age=60, max-age=600", Freshness(60)),
        ("no-cache, max-age=60", Freshness(0)),
        ("no-store", Freshness(0, may_be_kept=False)),
        ("max-age=60, no-store", Freshness(60, may_be_kept=False)),
        ("max-age=-1", Freshness(0)),
        ("max-age=soon", Freshness(0)),
        ("max-age=²", Freshness(0)),
        ("max-age=" + "9" * 5000, Freshness(MAX_SECONDS)),
        ("", Freshness(0)),
    ],
)
def test_only_what_the_origin_says_makes_an_answer_fresh(cache_control: str, freshness: Freshness) -> None:
    assert freshness_of(Cache_Control=cache_control) == freshness


def test_time_in_other_caches_counts() -> None:
    assert freshness_of(Cache_Control="max-age=60", Age="45") == Freshness(15)
    assert freshness_of(Cache_Control="max-age=60", Age="100") == Freshness(0)


@pytest.mark.parametrize("age", ["5, 6", "5.5", "-5", "soon"])
def test_an_answer_of_unknown_age_is_not_fresh(age: str) -> None:
    assert freshness_of(Cache_Control="max-age=60", Age=age) == Freshness(0)


def test_an_answer_that_depends_on_all_is_never_fresh_and_one_that_depends_on_our_headers_always() -> None:
    assert freshness_of(Cache_Control="max-age=60", Vary="*") == Freshness(0)
    assert freshness_of(Cache_Control="max-age=60", Vary="Accept, *") == Freshness(0)
    assert freshness_of(Cache_Control="max-age=60", Vary="Cookie, Accept") == Freshness(60)


def test_a_way_is_as_fresh_as_its_least_fresh_step() -> None:
    way = Freshness(60).at_most(Freshness(5, may_be_kept=False)).at_most(Freshness(70))
    assert way == Freshness(5, may_be_kept=False)


@given(st.lists(st.tuples(st.sampled_from([b"cache-control", b"AGE", b"vary", b"etag"]), st.binary(max_size=30))))
def test_any_headers_have_a_meaning(headers: list[tuple[bytes, bytes]]) -> None:
    assert 0 <= read_freshness(headers).seconds <= MAX_SECONDS
    read_validators(headers, "http://a/").as_headers()


def test_validators_are_given_back_as_they_came() -> None:
    headers = [(b"ETag", b'W/"\xe4"'), (b"Last-Modified", b"Sat, 21 Nov 2026")]
    validators = read_validators(headers, "http://a/")
    assert validators.as_headers() == [(b"If-None-Match", b'W/"\xe4"'), (b"If-Modified-Since", b"Sat, 21 Nov 2026")]
    assert Validators("http://a/", None, None).as_headers() == []
    assert read_validators([(b"etag", b"a" * 2000)], "http://a/").etag is None
