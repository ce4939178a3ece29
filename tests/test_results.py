"""Files that commands write."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from thinwire_tools import cli
from thinwire_tools.results import Results, check_output_file


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        check_output_file(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        check_output_file(tmp_path / "missing" / "figures.json")
    assert check_output_file(tmp_path / "figures.json") == tmp_path / "figures.json"
    assert list(tmp_path.iterdir()) == []
    # Before the run.
    started = tmp_path / "started"
    with pytest.raises(SystemExit):
        cli.main(["lab", "--ranks", "1", "--json", str(tmp_path / "missing" / "lab.json"), "--", "touch", str(started)])
    assert "there is no folder" in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert not started.exists()


def test_links_stay(tmp_path: Path) -> None:
    link, chained, lost, circle = (tmp_path / name for name in ("link", "chained", "lost", "circle"))
    link.symlink_to("figures.json")
    chained.symlink_to(link)
    lost.symlink_to(tmp_path / "missing" / "figures.json")
    circle.symlink_to(circle)
    before = sorted(tmp_path.iterdir())
    for path in (link, chained):
        assert check_output_file(path) == path
    for path in (lost, circle):
        with pytest.raises(ValueError, match="cannot be written"):
            check_output_file(path)
    assert sorted(tmp_path.iterdir()) == before
    Results("lab").write(chained)
    assert (tmp_path / "figures.json").is_file()
    assert link.is_symlink()
    assert chained.is_symlink()
    check_output_file(chained)
    assert (tmp_path / "figures.json").is_file()


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="Linux has /proc, which root may write, and which takes no files"
)
def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(ValueError, match=r"/proc/figures\.json cannot be written"):
        check_output_file("/proc/figures.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "figures.json").touch(mode=0o400)
    with pytest.raises(ValueError, match="permission denied"):
        check_output_file(tmp_path / "figures.json")


def test_every_command_checks_the_files_that_it_writes() -> None:
    for words, command in cli.THINWIRE.commands.items():
        parameters = inspect.signature(command.load()).parameters
        for name in {"json", "html"} & set(parameters):
            assert parameters[name].annotation == "OutputFile", words
