from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.frontend.prompt.plain_text import PlainText
from keepsight.frontend.prompt.tokenizer import Tokenizer
from tests.frontend.prompt.test_tokenizer import JUDGED, JUDGED_NAMES, TEXTS


@pytest.mark.parametrize("directory", JUDGED, ids=JUDGED_NAMES)
def test_nothing_gives_a_plain_text_structure_and_all_else_of_it_is_there(directory: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(directory)
    as_plain, structure = PlainText(tokenizer.structure), set(map(tokenizer.token_id, tokenizer.structure))
    assert structure

    @settings(max_examples=150)
    @given(TEXTS)
    def check(text: str) -> None:
        plain = as_plain(text)
        assert plain.replace(" ", "") == text.replace(" ", "")
        assert structure.isdisjoint(tokenizer.encode(plain))
        if structure.isdisjoint(tokenizer.encode(text)):
            assert plain == text

    check()


def test_markers_that_overlap_or_contain_each_other_are_all_split() -> None:
    as_plain = PlainText(["<image>", "<image><image>", "(x)", "ab", "bc", ""])
    assert as_plain("<image><image>, <image> and (x) abc") == "< image>< image>, < image> and ( x) a b c"


@given(st.text())
def test_without_markers_any_text_is_plain(text: str) -> None:
    assert PlainText([])(text) == text
