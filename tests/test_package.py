"""Effects of importing the package on the process."""

import os
import subprocess
import sys

import pytest

import keepsight
from keepsight import outputs


def run(program: str, **variables: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run(
        [sys.executable, "-c", program], env={**plain, **variables}, check=True, stdout=subprocess.PIPE, text=True
    )
    return found.stdout.strip()


def test_output_types_are_exported_as_in_vllm() -> None:
    assert {"CompletionOutput", "RequestOutput"} <= {*keepsight.__all__}
    assert (keepsight.CompletionOutput, keepsight.RequestOutput) == (outputs.CompletionOutput, outputs.RequestOutput)


def test_importing_the_package_and_the_command_does_not_import_torch() -> None:
    assert run("import sys, keepsight, keepsight.cli.main; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "a count", "a policy"],
)
def test_openmp_threads_spin_briefly_unless_configured_otherwise(given: dict[str, str], expected: str) -> None:
    assert run("import os, keepsight; print(os.environ.get('GOMP_SPINCOUNT'))", **given) == expected
