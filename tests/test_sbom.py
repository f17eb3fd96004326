"""The list of what an installation consists of: valid, complete, with versions and licences."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent
# Whose metadata name no licence of the SPDX list, and what their file LICENSE is.
UNNAMED = {"protobuf": "BSD-3-Clause"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The list of the environment of the tests, written as `make sbom` writes that of a server."""
    file = tmp_path_factory.mktemp("sbom") / "rankscope.cdx.json"
    done = subprocess.run(
        [REPOSITORY / ".ci" / "sbom", sys.prefix, file],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def listed(text):
    """Name -> component, and the graph: reference -> what that needs."""
    bom = json.loads(text)
    components = {canonicalize_name(c["name"]): c for c in bom["components"]}
    graph = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    return bom["metadata"]["component"], components, graph


def test_the_schema_accepts_it(text):
    written = json.loads(text)["specVersion"]
    validator = JsonStrictValidator(SchemaVersion[f"V{written.replace('.', '_')}"])
    assert validator.validate_str(text) is None
    spoilt = text.replace('"components": [', '"components": [{},', 1)
    assert validator.validate_str(spoilt) is not None


def test_it_names_what_is_installed_with_its_version(listed):
    _, components, _ = listed
    for name in ("msgpack", "numpy", "urllib3", "fastapi", "sqlalchemy", "opentelemetry-proto"):
        assert components[name]["version"] == version(name)
        assert components[name]["purl"].startswith(f"pkg:pypi/{name}@{version(name)}")


def test_it_says_who_needs_what(listed):
    root, components, graph = listed
    assert (root["name"], root["version"]) == ("rankscope", version("rankscope"))
    needed = {ref.partition("==")[0] for ref in graph[root["bom-ref"]]}
    assert {"msgpack", "numpy", "platformdirs", "urllib3"} <= needed
    assert components["starlette"]["bom-ref"] in graph[components["fastapi"]["bom-ref"]]


def test_each_package_of_a_server_names_its_licence(listed):
    _, components, graph = listed
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["server"], *extras["postgres"], *extras["otel"]]
    names = {canonicalize_name(Requirement(line).name) for line in lines} - {"rankscope"}
    waiting, reached = [components[name]["bom-ref"] for name in names], set()
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += graph[ref]
    silent = {
        name for name, c in components.items() if c["bom-ref"] in reached and not c.get("licenses")
    }
    assert len(reached) > len(names)
    assert silent == set(UNNAMED)
