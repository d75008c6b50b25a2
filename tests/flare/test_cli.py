"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flare.cli import main

COMMANDS = ("run", "chat", "bench", "graphs", "simulate", "tune", "explain")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.split("Commands:")[1].splitlines() if line.strip()] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"Usage: flare {command} " in capsys.readouterr().out


def test_defaults_are_shown_as_one_would_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Memory of the KV cache, such as 3GiB; unset, on cuda: what" in shown
    assert "[default: 3GiB; cuda: unset; sim: 16GiB]" in shown
    assert "Time that running requests have to end after SIGTERM. [default: 30]" in shown


@pytest.mark.parametrize("arguments", [["serve"], ["--nonsense"], ["chat", "--nonsense"], []])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", ["run", "chat", "bench", "graphs", "explain"])
def test_no_command_waits_for_torch_before_it_needs_it(command: str) -> None:
    program = (
        "import sys\n"
        "from flare.cli import main\n"
        "try:\n"
        "    main([sys.argv[1], '--help'])\n"
        "except SystemExit:\n"
        "    sys.exit('torch' in sys.modules)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, command], check=False, stdout=subprocess.DEVNULL).returncode == 0
    )
