"""Run Schemathesis against a real server, using the server's own OpenAPI description.

    pip install -e ".[fuzz]" && python -m tests.fuzz_api [EXAMPLES]

EXAMPLES per operation (default 50; 1000 are more than 10,000 requests). Fails on any answer with status 500, or with
a status, a content type or a body that the description does not contain.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real_server import real_server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> int:
    examples = sys.argv[1] if len(sys.argv) > 1 else "50"
    # A short context keeps all answers short.
    with real_server("--max-model-len", "96") as server:
        status = _fuzz(server.url, examples)
        return status or int("Traceback" in server.log.read_text())


def _fuzz(url: str, examples: str) -> int:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    options = ["--checks", CHECKS, "--max-examples", examples, "--no-color", "--generation-deterministic"]
    with tempfile.TemporaryDirectory() as folder:  # Schemathesis writes files into its working directory
        return subprocess.run([*command, *options, "--request-timeout", "60"], check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
