"""Schemathesis against a real server, by the description that the server gives of itself.

    pip install -e ".[fuzz]" && python tests/fuzz_api.py [EXAMPLES]

EXAMPLES of each operation (default 50; 1000 are more than 10,000 requests).  Fails if anything is answered with a 500,
or with a status, a content type or a body that the description does not have.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

# Of a short context, so that no answer is long.
COMMAND = [*(sys.executable, "-m", "keepsight", "serve", "--port", "0", "--no-log-requests"), "--max-model-len", "96"]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> int:
    examples = sys.argv[1] if len(sys.argv) > 1 else "50"
    with (
        tempfile.NamedTemporaryFile("r", suffix=".log") as log,
        Path(log.name).open("w") as stderr,
        subprocess.Popen(COMMAND, stderr=stderr) as server,
    ):
        try:
            status = _fuzz(_wait_for_url(server, log), examples)
        finally:
            server.terminate()
        return status or int("Traceback" in Path(log.name).read_text())


def _wait_for_url(server: "subprocess.Popen[bytes]", log: IO[str]) -> str:
    while server.poll() is None:
        if found := re.search(r" is served on (http://\S+)/v1", Path(log.name).read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def _fuzz(url: str, examples: str) -> int:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    options = ["--checks", CHECKS, "--max-examples", examples, "--no-color", "--generation-deterministic"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves its notes where it is started
        return subprocess.run([*command, *options, "--request-timeout", "60"], check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
