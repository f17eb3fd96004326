"""Helm's own engine, and Kubernetes' own schemas, in an environment of their own.

Helm's library and the schemas of all versions of Kubernetes take 350 MB: `make test-chart` installs
them into `.venv-chart`, elsewhere the tests of the chart are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
CHART = REPOSITORY / "examples" / "deployment" / "helm"
PYTHON = Path(os.environ.get("CHART_VENV") or REPOSITORY / ".venv-chart") / "bin" / "python"
HOW_TO_INSTALL = f"no Helm in {PYTHON.parent.parent}: make test-chart"

_LINT = """
import json, sys, helm_python
print(json.dumps(helm_python.lint(sys.argv[1])))
"""
_RENDER = """
import json, sys, helm_python
with helm_python.Chart.load(sys.argv[1]) as chart:
    values = json.load(sys.stdin)
    chart.validate_schema(values)
    print(json.dumps(chart.render(values, name="demo", namespace="prod")))
"""
_VALIDATE = """
import json, sys, kubernetes_validate
for document in json.load(sys.stdin):
    kubernetes_validate.validate(document, sys.argv[1], strict=True)
"""


class Refused(Exception):
    """Helm or Kubernetes' schema says no."""


def lint() -> dict[str, Any]:
    """What `helm lint` says of the chart."""
    return json.loads(_called(_LINT, str(CHART)))


def render(values: dict[str, Any]) -> dict[str, str]:
    """Each template as it comes out for the release `demo` in `prod`, by its file's name.

    Raises:
        Refused: the values are not what the chart takes.
    """
    printed = _called(_RENDER, str(CHART), given=json.dumps(values))
    return {name.rpartition("/")[2]: text for name, text in json.loads(printed).items()}


def validate(documents: list[Any], version: str) -> None:
    """Checks documents by the schemas of a version of Kubernetes, which know all members.

    Raises:
        Refused: one of them is not valid.
    """
    _called(_VALIDATE, version, given=json.dumps(documents))


def _called(program: str, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout
