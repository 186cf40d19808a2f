from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import MediaRefusedError
from keepsight.frontend.intake.web_url import UrlFault, WebUrl, parse_web_url, to_ascii_host

FIELD = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://example.org", WebUrl("http", "example.org", 80, "/")),
        ("HTTPS://EXAMPLE.org:443/a.png?b=c#d", WebUrl("https", "example.org", 443, "/a.png?b=c")),
        ("http://example.org.:8080/a%20b", WebUrl("http", "example.org", 8080, "/a%20b")),
        ("https://bücher.example/ä?ö", WebUrl("https", "xn--bcher-kva.example", 443, "/%C3%A4?%C3%B6")),
        ("http://[::1]:8000/", WebUrl("http", "::1", 8000, "/")),
        # Fullwidth digits: the normalized host is both checked and resolved.
        ("http://１２７.0.0.1/", WebUrl("http", "127.0.0.1", 80, "/")),
        ("http://0x7f.1/", WebUrl("http", "0x7f.1", 80, "/")),
    ],
)
def test_a_url_has_one_reading(text: str, url: WebUrl) -> None:
    assert parse_web_url(text) == url
    assert parse_web_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://user@example.org/", "user name or password"),
        ("http://user:secret@example.org/", "user name or password"),
        ("http://example.org@127.0.0.1/", "user name or password"),
        ("ftp://example.org/", "ftp: URLs are not fetched"),
        ("gopher://example.org/", "gopher: URLs"),
        ("//example.org/", "only http: and https:"),
        ("http://example.org:22/", "port 22 is not allowed"),
        ("http://example.org:0/", "port 0 is not allowed"),
        ("http://example.org:99999/", "is not a URL that can be fetched"),
        ("http://example.org:port/", "is not a URL that can be fetched"),
        ("http:///a.png", "is not a host"),
        ("http://exa mple.org/", "percent-encoded"),
        ("http://example.org\\@127.0.0.1/", "percent-encoded"),
        ("http://example.org/\r\nHost: inner", "percent-encoded"),
        ("http://example.org%00.inner/", "is not a host"),
        ("http://[fe80::1%eth0]/", "is no"),
        ("http://[::1/", "is not a URL that can be fetched"),
        ("http://a..b/", "is not a URL that can be fetched"),
        (f"http://{'a' * 64}.org/", "is not a URL that can be fetched"),
        ("http://example.org/\ud800", "is not a URL that can be fetched"),
        ("http://example.org/" + "a" * 5000, "5019 characters is too long, at most 4096"),
    ],
)
def test_what_could_be_read_in_two_ways_or_leads_elsewhere_is_refused(text: str, message: str) -> None:
    with pytest.raises(UrlFault, match=message) as caught:
        parse_web_url(text)
    error = caught.value.under(FIELD)
    assert (type(error), error.field, error.status) == (MediaRefusedError, FIELD, 400)


URLS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["http://", "https://", "HTTP:", "http:/", ""]),
    st.text("aA0.:@[]%/\\-_é\u3002１ ", max_size=12),
    st.sampled_from(["", "/", "?", "#", ":80", ":"]),
    st.text(max_size=12),
)


@given(text=URLS | st.text(max_size=40))
def test_any_text_is_a_url_of_our_own_spelling_or_our_own_error(text: str) -> None:
    try:
        url = parse_web_url(text)
    except UrlFault:
        return
    assert parse_web_url(str(url)) == url
    assert (url.target.encode("ascii").split()) == [url.target.encode()]
    assert to_ascii_host(url.host) == url.host


@given(location=URLS | st.text(max_size=40))
def test_any_redirect_leads_to_a_url_or_to_our_own_error(location: str) -> None:
    start = parse_web_url("https://example.org/a/b")
    with suppress(UrlFault):
        assert start.join(location).scheme in ("http", "https")


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("c.png", "https://example.org/a/c.png"),
        ("/c.png", "https://example.org/c.png"),
        ("//other.org/c", "https://other.org/c"),
        ("http://[::1]/", "http://[::1]/"),
    ],
)
def test_redirects_may_be_relative(location: str, url: str) -> None:
    assert str(parse_web_url("https://example.org/a/b").join(location)) == url
