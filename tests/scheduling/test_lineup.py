"""Which sequences have seats, which stand in line, and which are parked."""

from tests.scheduling.drive import Drive, make_config, make_request


def test_a_request_without_a_seat_stands_in_line_or_is_parked() -> None:
    # Requests arrive one by one, because several together would make a crowd.
    drive = Drive(make_config(max_prompt_tokens_beside_streams=4), delivers=False, is_done=lambda: False)
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.add(make_request("beside", 20, cache_salt="its own"))
    drive.step()
    drive.add(make_request("for the lane", 20, cache_salt="another"))
    for number in range(2):
        drive.add(make_request(f"for pixels {number}", "cat", 3))
        drive.step()
    drive.add(make_request("in line", 20))
    lineup = drive.scheduler.lineup
    assert [state.sequence_id[0] for state in lineup.running] == ["stream", "beside"]
    assert {state.sequence_id[0] for state in lineup.unseated()} == {
        "for the lane",
        "for pixels 0",
        "for pixels 1",
        "in line",
    }
    assert (len(lineup), lineup.num_unseated, lineup.num_kept_waiting) == (6, 4, 2)
