"""What importing the package brings, and what it does not."""

import subprocess
import sys

import twostroke.fsm as fsm


def test_every_public_name_is_there() -> None:
    assert sorted(fsm.__all__) == sorted(set(fsm.__all__))
    assert all(hasattr(fsm, name) for name in fsm.__all__)


def test_importing_fsm_loads_no_torch_and_nothing_above_it() -> None:
    program = (
        "import sys, twostroke.fsm; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')"
        " or name.startswith(('twostroke.engine', 'twostroke.stages'))])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
