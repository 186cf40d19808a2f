"""In throughput mode encodings and steps take turns, and neither waits forever."""

from random import Random

import pytest

from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, make_config, make_request


def test_for_throughput_answers_pause_while_pictures_are_encoded() -> None:
    drive = Drive(make_config(takes_turns=True))
    drive.add(make_request("text", 3, max_tokens=4, ignore_eos=True))
    drive.step()
    drive.runner.set_pace(lambda: False)
    drive.add(make_request("picture", 3, "cat", 3, max_tokens=4, ignore_eos=True))
    drive.step()
    for _ in range(4):
        drive.step()
    assert len(drive.tokens["text", 0]) < 4
    drive.runner.set_pace(lambda: True)
    plans = drive.run()
    assert max(len(plan.now) for plan in plans) == 2
    drive.expect_right_answers()


def test_for_throughput_a_prompt_that_has_begun_pauses_too() -> None:
    drive = Drive(make_config(takes_turns=True, max_num_batched_tokens=14), is_done=lambda: False)
    drive.add(make_request("long", 100, max_tokens=1))
    drive.step()
    drive.add(make_request("picture", "cat", 2, priority=-1, max_tokens=1))
    while not drive.step().encode:
        pass
    assert ("long", 0) not in drive.finished
    assert not drive.step().now
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_for_throughput_a_round_of_encodings_and_a_step_of_prompts_take_turns() -> None:
    drive = Drive(make_config(takes_turns=True), is_done=lambda: False)
    drive.add(make_request("pictures", "cat", 2, "dog", 2, max_tokens=1))
    drive.step()
    assert [each.media_hash for each in drive.step().encode] == ["cat", "dog"]
    drive.add(make_request("another", "owl", 2, max_tokens=1))
    drive.add(make_request("text", 9, max_tokens=1))
    for _ in range(3):
        assert not drive.step().now
    drive.runner.set_pace(lambda: True)
    drive.step()
    prompts = drive.step()
    assert {each.sequence_id[0] for each in prompts.now} == {"pictures", "text"}
    assert not prompts.encode
    assert [each.media_hash for each in drive.step().encode] == ["owl"]
    drive.expect_all_answered()


@pytest.mark.parametrize("others", [(9,), ("owl", 9)], ids=["texts", "pictures"])
def test_for_throughput_new_requests_starve_no_other(others: tuple[int | str, ...]) -> None:
    drive = Drive(make_config(takes_turns=True, num_blocks=200))
    for number in range(40):
        drive.add(make_request(f"other{number}", *(f"{each}{number}" if each == "owl" else each for each in others)))
        if number == 4:
            drive.add(make_request("text", 9, max_tokens=1, priority=1))
            drive.add(make_request("picture", "cat", 2, max_tokens=1, priority=1))
        if number == 30:
            assert {("text", 0), ("picture", 0)} <= drive.finished.keys()
        drive.step()
    drive.expect_all_answered()


def test_answers_that_fill_all_seats_do_not_pause() -> None:
    drive = Drive(make_config(takes_turns=True, max_num_seqs=1), is_done=lambda: False)
    drive.add(make_request("text", 3, max_tokens=4))
    drive.add(make_request("picture", 3, "cat", 3))
    for _ in range(6):
        drive.step()
    assert ("text", 0) in drive.finished


@pytest.mark.parametrize("seed", range(10))
def test_no_waiting_request_is_overlooked_while_streams_pause_for_encodings(seed: int) -> None:
    config = make_config(
        num_blocks=60, block_size=1, caches_prefixes=False, max_prompt_ends=0, num_pictures=2, shares_embeddings=False,
        max_num_batched_tokens=8, max_num_seqs=2, max_num_encoder_input_tokens=2 * TOKENS_PER_PICTURE,
        max_prompt_tokens_beside_streams=1, takes_turns=True,
    )  # fmt: skip
    pace = Random(seed)
    drive = Drive(config, is_done=lambda: pace.random() < 0.1)
    drive.add(make_request("text", 1, max_tokens=3))
    drive.add(make_request("dog", "dog", cache_salt="x", max_tokens=1))
    drive.add(make_request("both", 1, 1, "dog", "cat", cache_salt="x", max_tokens=1, n=2, priority=-1))
    drive.run(max_steps=5000)  # fails if the loop would sleep while there is something to ask for
    drive.expect_right_answers()


def test_an_encoder_turn_goes_to_prompts_if_its_encoding_is_given_up() -> None:
    """The request that waited for the second picture finds that another one computed it meanwhile."""
    config = make_config(
        block_size=1,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        max_num_encoder_input_tokens=TOKENS_PER_PICTURE,
        num_pictures=4,
        shares_embeddings=False,
        takes_turns=True,
    )
    drive = Drive(config)
    for name in ("first", "same"):
        drive.add(make_request(name, "cat", "owl", max_tokens=2, n=2))
    drive.expect_all_answered()  # fails if the loop would sleep while there is something to compute
