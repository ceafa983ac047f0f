"""The command line: verbs, versions, refusals."""

import subprocess
import sys

from elman import __version__
from elman.cli import run


def test_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"elman {__version__}\n"


def test_unknown_verb_is_refused_with_a_hint(capsys):
    assert run(["fly"]) == 2
    said = capsys.readouterr().err
    assert "error: No such command 'fly'." in said
    assert "hint: elman --help" in said


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from elman.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
