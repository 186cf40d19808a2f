"""`keepsight cache simulate` prints a row per policy and a column per size; the other commands inspect a disk tier."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cache_traces import zipf
from keepsight.cli.main import main
from keepsight.errors import TierError
from keepsight.runner import load_runner
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.pins import pins_in
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.trace import TraceRecorder
from tests.drawn import draw
from tests.place import FLAGS
from tests.tiers.arrays import array_of, key_of

CROPS = '{"do_pan_and_scan": true}'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    for access in zipf(500):
        recorder.record(access)
    recorder.close()
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("options", [[], ["--cache-gb", "0.1"]])
def test_every_policy_and_the_bounds_are_printed(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["cache", "simulate", str(trace), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("500 uses of ")
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(rows) == ["memory", *POLICIES, "belady", "bound"]
    shares = {name: [float(cell.rstrip("%")) for cell in cells] for name, cells in rows.items() if name != "memory"}
    assert all(len(cells) == 5 for cells in shares.values())
    assert all(cells == sorted(cells) for cells in shares.values())
    assert all(share <= bound for cells in shares.values() for share, bound in zip(cells, shares["bound"], strict=True))


@pytest.mark.parametrize("options", [["--cache-gb", "0"], ["--cache-gb", "nan"], ["--cache-gb", "1e300"]])
def test_invalid_sizes_are_refused(trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["cache", "simulate", str(trace), *options]) == 2
    assert "--cache-gb" in capsys.readouterr().err


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert main(["cache", "simulate", str(tmp_path / "x")]) == 2
    assert "line 1" in capsys.readouterr().err
    (tmp_path / "x").write_text("")
    assert main(["cache", "simulate", str(tmp_path / "x")]) == 2


# Inspecting ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tier_folder(tmp_path: Path) -> Path:
    """A disk tier with three entries."""
    tier = DiskTier(folder := tmp_path / "embeddings", 2**30)
    for number in range(3):
        assert tier.put(key_of(number), array_of(number))
    tier.close()
    return folder


def test_kept_entries_are_counted_verified_and_cleared(tier_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = ["--disk", str(tier_folder)]
    assert main(["cache", "inspect", *disk]) == 0
    assert main(["cache", "verify", *disk]) == 0
    damaged = tier_folder / "entries" / key_of(1)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert main(["cache", "verify", *disk]) == 1
    assert main(["cache", "clear", *disk]) == 0
    assert main(["cache", "inspect", *disk]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 entries, ")
    assert [line.split(",")[1] for line in lines[1:3]] == [
        " 0 of them damaged",
        " 1 of them damaged",
    ]
    assert lines[3:] == ["2 entries removed", "0 entries, 0.0 MiB"]


def test_entries_of_a_read_only_folder_are_not_reported_as_removed(
    tier_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keepsight.tiers.disk_tier.os.access", lambda *_: False)
    assert main(["cache", "clear", "--disk", str(tier_folder)]) == 1
    assert capsys.readouterr().out == "0 entries removed, 3 could not be\n"


def test_a_closed_output_is_not_reported_as_a_cache_error(tier_folder: Path) -> None:
    for number in range(2000):  # more lines than the output buffer holds
        (tier_folder / "entries" / key_of(number)).touch()
    command = [sys.executable, "-m", "keepsight", "cache", "inspect", "--keys", "--disk", str(tier_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as inspecting:
        assert inspecting.stdout is not None
        assert inspecting.stderr is not None
        inspecting.stdout.close()
        assert (inspecting.wait(), inspecting.stderr.read()) == (141, "")


@pytest.mark.parametrize(
    "typed",
    [
        ["inspect", "--disk"],
        ["clear", "--disk"],
        *([each, "0" * 64, "--encoder-disk-cache"] for each in ("pin", "unpin")),
    ],
)
def test_a_folder_that_cannot_be_read_is_reported_with_its_flag(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *typed, f"{tmp_path}/{'long' * 100}"]) == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith(f"keepsight cache: {typed[-1]}: {tmp_path}")
    assert "File name too long" in error_output


@pytest.mark.parametrize(
    "typed",
    [
        ["inspect", "--disk"],
        ["pin", "0" * 64, "--encoder-disk-cache"],
    ],
)
def test_a_link_to_nothing_is_reported_as_such(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert main(["cache", *typed, f"{tmp_path}/link"]) == 2
    reason = f"cannot be used: it is a link to {tmp_path}/nowhere, which does not exist"
    assert f"{typed[-1]}: {tmp_path}/link {reason}" in capsys.readouterr().err
    with pytest.raises(TierError, match="it is a link to"):
        DiskTier(tmp_path / "link", 2**30).open()


def test_inspecting_creates_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "inspect", "--disk", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == f"nothing is kept in {tmp_path / 'none'}\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "typed", [["inspect", "--disk"], ["clear", "--disk"], ["pin", "0" * 64, "--encoder-disk-cache"]]
)
def test_a_folder_with_other_content_is_left_unchanged(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").touch()
    main(["cache", *typed, str(tmp_path)])
    output = capsys.readouterr()
    assert "nothing is kept" in output.out + output.err
    assert [each.name for each in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize("typed", [["clear", "--disk"], ["unpin", "--all", "--encoder-disk-cache"]])
def test_an_empty_path_does_not_mean_the_default_folder(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tier = DiskTier(tmp_path / "keepsight" / "embeddings", 2**30)
    assert tier.put(key_of(1), array_of(1))
    pins_in(tmp_path / "keepsight" / "embeddings").add(key_of(1))
    assert main(["cache", *typed, ""]) == 2
    assert f"{typed[-1]}: must not be empty" in capsys.readouterr().err
    assert tier.has(key_of(1))
    assert set(pins_in(tmp_path / "keepsight" / "embeddings")) == {key_of(1)}
    assert set(tier.list_sizes()) == {key_of(1)}
    tier.close()


def test_an_unreachable_server_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--remote", f"unix://{tmp_path}/none"]) == 2
    assert "--remote" in capsys.readouterr().err


def test_an_invalid_address_is_reported_by_the_flag_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "inspect", "--remote", "redis://[::1"]) == 2
    assert "--remote: must be redis://" in capsys.readouterr().err


def test_warmed_pictures_are_cached_and_can_be_pinned_with_the_same_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, other = tmp_path / "picture.png", tmp_path / "other.png"
    # Wide enough for crops, which are pinned with the picture.
    draw(3).picture.resize((1200, 400)).save(picture)
    draw(4).picture.save(other)
    options = ["--encoder-disk-cache", str(tmp_path / "kept"), *FLAGS, "--mm-processor-kwargs", CROPS]
    # Also with a prefix disk cache, whose hits would otherwise skip the encoding.
    for _ in range(2):
        assert main(["cache", "warm", str(picture), *options, "--prefix-disk-cache", str(tmp_path / "prefixes")]) == 0
        assert "disk: 4 entries" in capsys.readouterr().out
    assert not (tmp_path / "prefixes").exists()
    assert main(["cache", "pin", str(picture), *options]) == 0
    assert capsys.readouterr().out.startswith("4 embeddings pinned; ")
    assert main(["cache", "pin", str(picture), str(other), *options]) == 2
    assert f"{other} is not kept in {tmp_path / 'kept'}; `keepsight cache warm`" in capsys.readouterr().err
    assert main(["cache", "unpin", str(picture), str(other), *options]) == 0
    assert capsys.readouterr().out == "4 embeddings unpinned\n"


def test_pictures_warmed_with_other_kernels_are_neither_pinned_nor_taken_for_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another kind of processor, whose results differ in the last bits."""
    draw(3).picture.save(tmp_path / "picture.png")
    given = [str(tmp_path / "picture.png"), "--encoder-disk-cache", str(tmp_path / "kept"), *FLAGS]
    assert main(["cache", "warm", *given]) == 0
    monkeypatch.setattr(load_runner, "describe_kernels", lambda _: "other kernels")
    assert main(["cache", "pin", *given]) == 2
    assert "is not kept in" in capsys.readouterr().err
    assert main(["cache", "warm", *given]) == 0
    assert "disk: 2 entries" in capsys.readouterr().out
    assert main(["cache", "pin", *given]) == 0


@pytest.mark.parametrize("kept_bytes", [20, 900])
def test_a_picture_that_cannot_be_warmed_is_reported_with_its_file(
    kept_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [tmp_path / f"{name}.png" for name in ("a", "cut", "b")]
    for picture in pictures:
        draw(3).picture.save(picture)
    # Truncated within the header, which is read before a model is loaded, or after it.
    pictures[1].write_bytes(pictures[1].read_bytes()[:kept_bytes])
    options = ["--encoder-disk-cache", str(tmp_path / "kept"), *FLAGS]
    assert main(["cache", "warm", *map(str, pictures), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keepsight cache: {pictures[1]}: the picture ({kept_bytes} bytes) is damaged or truncated")


@pytest.mark.parametrize("flag", ["--encoder-disk-cache", "--encoder-remote-cache"])
def test_an_unusable_cache_is_refused_before_a_model_is_loaded(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    draw(3).picture.save(picture)
    scheme = "" if flag == "--encoder-disk-cache" else "unix://"
    assert main(["cache", "warm", str(picture), flag, f"{scheme}{picture}/none"]) == 2
    assert f"{flag}: {picture}/none cannot be used: " in capsys.readouterr().err


def test_pictures_that_were_encoded_but_not_kept_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    draw(3).picture.save(picture)
    # The tier is smaller than one embedding.
    assert main(["cache", "warm", str(picture), "--encoder-disk-cache", f"{tmp_path}/kept:4K", *FLAGS]) == 1
    assert capsys.readouterr().out.endswith(f"\n{picture} is not kept by the disk tier\n")


# Pins ---------------------------------------------------------------------------------------------------------


def test_pins_are_shown_and_can_be_removed(tier_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, keys = ["--encoder-disk-cache", str(tier_folder)], [key_of(number) for number in range(3)]
    assert main(["cache", "pin", keys[0], keys[2], *place]) == 0
    # A failing `pin` does not unpin entries that were already pinned.
    assert main(["cache", "pin", keys[2], key_of(7), *place]) == 2
    assert main(["cache", "inspect", "--keys", "--disk", str(tier_folder)]) == 0
    assert main(["cache", "unpin", keys[0], *place]) == 0
    (tier_folder / "entries" / keys[2]).unlink()
    assert main(["cache", "inspect", "--disk", str(tier_folder)]) == 0
    assert main(["cache", "unpin", "--all", *place]) == 0
    assert main(["cache", "inspect", "--disk", str(tier_folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 embeddings pinned; all pinned take 0.0 of 16384.0 MiB",
        "3 entries, 0.0 MiB; 2 pinned, 0.0 MiB",
        *sorted(f"{key} 4096{'' if key == keys[1] else ' pinned'}" for key in keys),
        "1 embeddings unpinned",
        "2 entries, 0.0 MiB; 0 pinned, 0.0 MiB; 1 pinned but missing",
        "1 embeddings unpinned",
        "2 entries, 0.0 MiB",
    ]


def test_pinning_in_a_refused_folder_leaves_it_as_it_was(tier_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tier_folder / "entries").chmod(0o755)
    files = set(tier_folder.rglob("*"))
    assert main(["cache", "pin", key_of(0), "--encoder-disk-cache", str(tier_folder)]) == 2
    assert "must be this user's and closed to others" in capsys.readouterr().err
    assert set(tier_folder.rglob("*")) == files


def test_pictures_pinned_while_their_server_runs_are_kept(tmp_path: Path) -> None:
    server = DiskTier(tmp_path, 10 * 4096)
    for number in range(30):
        assert server.put(key_of(number), array_of(number))
        if number == 5:
            assert main(["cache", "pin", key_of(0), "--encoder-disk-cache", f"{tmp_path}:40K"]) == 0
    assert key_of(0) in server.list_sizes()
    server.close()


def test_pins_never_take_more_than_the_budget(tier_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--encoder-disk-cache", f"{tier_folder}:9K"]
    assert main(["cache", "pin", key_of(0), key_of(1), *place]) == 0
    assert main(["cache", "pin", key_of(2), *place]) == 2
    assert "would hold 12288 bytes of pinned embeddings, more than its limit of 9216" in capsys.readouterr().err
    assert set(pins_in(tier_folder)) == {key_of(0), key_of(1)}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["pin", key_of(0), "--encoder-remote-cache", "redis://localhost"], "--encoder-remote-cache"),
        (["pin", key_of(0), "--encoder-disk-cache", "/nowhere/at/all"], "--encoder-disk-cache"),
        (["pin", "no-such-picture.png"], "PICTURE"),
        (["unpin"], "PICTURE|KEY"),
        (["unpin", "--all", key_of(0)], "PICTURE|KEY"),
    ],
)
def test_invalid_pins_are_refused(
    arguments: list[str],
    field: str,
    tier_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepsight.tiers.disk_place.cache_home", lambda: tier_folder.parent)
    assert main(["cache", *arguments]) == 2
    assert f"{field}: " in capsys.readouterr().err
    assert not list(pins_in(tier_folder))
