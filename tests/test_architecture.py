"""Which packages may import which. The rules keep each package independent of what it does not need."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "keepsight"
SMALL_NOUNS = {
    "keepsight.adapter_folder",
    "keepsight.api_settings",
    "keepsight.borrowed",
    "keepsight.cgroups",
    "keepsight.choose_by_merit",
    "keepsight.checkpoint_folder",
    "keepsight.config",
    "keepsight.count_cores",
    "keepsight.end_ids",
    "keepsight.engine_config",
    "keepsight.errors",
    "keepsight.film_config",
    "keepsight.film_processors",
    "keepsight.film_sizes",
    "keepsight.gbnf",
    "keepsight.host_memory",
    "keepsight.image_processor_config",
    "keepsight.json_fields",
    "keepsight.lora",
    "keepsight.lost_machines",
    "keepsight.lru_cache",
    "keepsight.made_once",
    "keepsight.media",
    "keepsight.model_limits",
    "keepsight.other_options",
    "keepsight.outputs",
    "keepsight.pixels",
    "keepsight.processor_config",
    "keepsight.requests",
    "keepsight.sampling_params",
    "keepsight.shown_sizes",
    "keepsight.sound_config",
    "keepsight.structured_outputs",
    "keepsight.token_bytes",
}
# `LLM` runs both in one process, and an engine may need the tokenizer for its end tokens.
PUTS_TOGETHER = {"engine/in_process_engine.py", "engine/load_engine.py", "engine/open_engine.py"}
# The only frontend module that may use torch, on the CPU.
RESIZES_PIXELS = "frontend/pixels/preprocess_image.py"
# Frontend packages: each may import only those before it. After them come request preparation, then the API.
PLACES_OF_FRONTEND = ("http", "prompt", "intake", "pixels", "identity")
WEB = re.compile(r"^(starlette|uvicorn|fastapi)\b")


def modules(folder: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each module's path within the package and the names of everything it imports, anywhere in the file."""
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), imports(path)


@cache
def imports(path: Path) -> frozenset[str]:
    return frozenset(_read_imports(path))


def _read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(folder: str, forbidden: str, but: str = "") -> list[str]:
    pattern = re.compile(forbidden)
    return [
        f"{name} imports {module}"
        for name, imported in modules(folder)
        if name != but
        for module in sorted(imported)
        if pattern.match(module)
    ]


def test_the_package_is_found() -> None:
    assert len(list(modules())) > 30


@pytest.mark.parametrize("folder", ["scheduling", "ipc", "tiers", "observe"])
def test_decisions_messages_tiers_and_counters_never_import_torch(folder: str) -> None:
    assert not offenders(folder, r"torch\b")


def test_the_frontend_uses_torch_only_where_it_resizes_pixels() -> None:
    assert not offenders("frontend", r"torch\b", but=RESIZES_PIXELS)
    assert not re.search(r"cuda|\.to\(", (PACKAGE / RESIZES_PIXELS).read_text())


def test_the_frontend_imports_nothing_of_the_engine() -> None:
    assert not offenders("frontend", r"keepsight\.(scheduling|runner|models|engine|llm|offline|cli)\b")


@pytest.mark.parametrize("place", PLACES_OF_FRONTEND)
def test_each_frontend_package_imports_only_earlier_ones(place: str) -> None:
    known = "|".join(PLACES_OF_FRONTEND[: PLACES_OF_FRONTEND.index(place) + 1])
    assert not offenders(f"frontend/{place}", rf"keepsight\.frontend\.(?!({known})\b)")


def test_only_the_frontend_process_imports_the_api() -> None:
    found = {offender.split()[0] for offender in offenders("", r"keepsight\.frontend\.api\b")}
    assert {name for name in found if not name.startswith("frontend/api/")} == {"frontend/frontend_process.py"}


def test_the_engine_imports_the_frontend_only_where_both_are_assembled() -> None:
    found = {offender.split()[0] for offender in offenders("engine", r"keepsight\.frontend\b")}
    assert found == PUTS_TOGETHER


def test_tiers_import_nothing_of_their_users() -> None:
    assert not offenders("tiers", r"keepsight\.(frontend|scheduling|runner|models|engine|llm|offline|cli)\b")


def test_observe_imports_nothing_of_what_it_observes() -> None:
    assert not offenders("observe", r"keepsight\.(?!observe\b|errors\b|media\b|requests\b)")


def test_the_router_imports_nothing_of_the_servers_behind_it() -> None:
    nouns = "|".join(noun.removeprefix("keepsight.") for noun in SMALL_NOUNS)
    http = r"frontend\.(http|prompt\.lift_data_urls)"
    assert not offenders("scaleout", rf"torch\b|keepsight\.(?!(scaleout|observe|program_identity|{http}|{nouns})\b)")


def test_only_the_command_imports_the_router() -> None:
    found = {offender.split()[0] for offender in offenders("", r"keepsight\.scaleout\b")}
    assert {name for name in found if not name.startswith("scaleout/")} <= {"cli/route.py", "cli/ray_servers.py"}


def test_the_benchmark_imports_nothing_of_the_server() -> None:
    from_within = ("bench/offline.py", "bench/parts.py", "bench/model_work.py")
    found = offenders("bench", r"torch\b|keepsight\.(?!(bench|errors|lost_machines)\b)")
    assert not [each for each in found if not each.startswith(from_within)]


def test_a_batch_is_answered_by_a_client_that_imports_nothing_of_the_server() -> None:
    assert not offenders("batch", r"torch\b|keepsight\.(?!(batch|bench|errors|lost_machines)\b)")


def test_models_import_only_small_value_types_of_the_package() -> None:
    allowed = (*SMALL_NOUNS, "keepsight.models")
    for name, imported in modules("models"):
        for module in imported:
            assert not module.startswith("keepsight") or module.startswith(allowed), f"{name} imports {module}"


def test_small_value_types_import_only_one_another_and_the_demo_path() -> None:
    for noun in SMALL_NOUNS:
        path = PACKAGE / f"{noun.removeprefix('keepsight.')}.py"
        for module in imports(path):
            assert not module.startswith(("torch", "transformers")), f"{noun} imports {module}"
            if module.startswith("keepsight."):
                assert module.startswith((*SMALL_NOUNS, "keepsight.demo")), f"{noun} imports {module}"


def test_the_web_framework_appears_only_in_http_in_the_api_and_in_the_router() -> None:
    for name, imported in modules():
        if not name.startswith(("frontend/http/", "frontend/api/", "scaleout/")):
            assert not any(WEB.match(module) for module in imported), name


def test_zeromq_is_imported_in_one_file() -> None:
    assert not offenders("", r"zmq\b", but="ipc/zmq_socket.py")


def test_nothing_imports_torchvision_or_pickle_and_only_borrowed_models_transformers() -> None:
    assert not offenders("", r"(torchvision|pickle|cloudpickle|dill|shelve|marshal)\b")
    found = {offender.split()[0] for offender in offenders("", r"transformers\b")}
    assert not {name for name in found if "borrowed" not in name}, found


def test_a_server_of_our_own_models_never_imports_transformers() -> None:
    program = (
        "import sys, keepsight.models.registry, keepsight.runner.load_runner; print('transformers' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_there_is_no_utils_module() -> None:
    assert not [name for name, _ in modules() if Path(name).stem in ("utils", "helpers", "common", "misc")]


def test_the_diagram_in_the_docs_names_every_package_and_module() -> None:
    _, picture, _ = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text().split("```", 2)
    shown = set(re.findall(r"\w+/?", picture))
    parts = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    parts |= {f"{place.parent.name}/" for place in (PACKAGE / "frontend").glob("*/__init__.py")}
    parts |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert parts <= shown, parts - shown
