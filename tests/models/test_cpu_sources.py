"""A library of CPU kernels is told from one that was compiled from other sources."""

from pathlib import Path

from keepsight.models.cpu_sources import identify_sources, is_compiled_from


def test_a_change_of_any_source_gives_another_identity(tmp_path: Path) -> None:
    def identity_with(header: str) -> str:
        (tmp_path / "cpu_work.h").write_text(header)
        return identify_sources(tmp_path)

    (tmp_path / "cpu_work.c").write_text('#include "cpu_work.h"\n')
    before = identity_with("long rows, size;")
    assert identity_with("long rows, slots, size;") != before
    assert identity_with("long rows, size;") == before
    (tmp_path / "cpu_work.py").touch()
    assert identify_sources(tmp_path) == before


def test_a_library_holds_the_identity_of_its_sources(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"\x7fELF one and others")
    assert is_compiled_from("one", tmp_path / "kernels.so")
    assert not is_compiled_from("two", tmp_path / "kernels.so")


def test_where_the_sources_were_left_out_every_library_will_do(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"\x7fELF")
    assert is_compiled_from(identify_sources(tmp_path), tmp_path / "kernels.so")
