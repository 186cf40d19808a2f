"""Options of other servers."""

import argparse
import re

import pytest

from keepsight.cli import serve
from keepsight.other_options import HINTS, explain_option


def served_options() -> set[str]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return {flag[2:].replace("-", "_") for flag in re.findall(r"--[a-z][\w-]+", parser.format_help())}


@pytest.mark.parametrize("name", HINTS)
def test_an_option_of_another_server_is_none_here_and_the_proposed_ones_are(name: str) -> None:
    assert name not in served_options()
    assert set(re.findall(r"<(\w+)>", HINTS[name])) <= served_options()


def test_a_proposed_option_is_spelled_as_it_is_typed() -> None:
    known = ("dtype", "max_model_len")
    hint = explain_option("context_length", known, spell=lambda name: f"--{name.replace('_', '-')}")
    assert hint == "is --max-model-len here"


def test_a_typo_is_explained_by_the_closest_option() -> None:
    hint = explain_option("max_model_length", ["max_model_len", "max_num_seqs"])
    assert hint == "is not an option; did you mean max_model_len?"


def test_what_would_propose_an_option_that_is_none_in_this_place_is_not_explained() -> None:
    assert explain_option("alias", ["dtype", "max_model_len"]) is None
    assert explain_option("max_cpu_loras", ["max_loras"]) == "is not an option; did you mean max_loras?"


def test_what_resembles_no_option_is_not_explained() -> None:
    assert explain_option("zzz", ["max_model_len"]) is None
