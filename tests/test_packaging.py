"""What is installed elsewhere is what is here: the wheel, its extras, its command, the pins."""

import configparser
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.servers.service import Service

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("agent", "client", "server", "dashboard", "migrations")
# In these folders, and in no wheel.
NOT_SHIPPED: set[str] = set()
# In no folder of the repository, and in each wheel that was built where there is a compiler.
BUILT = {"rankscope/agent/fingerprint/_kernel.so"}


@pytest.fixture(scope="module")
def tracked():
    """Paths of the files that git knows in our packages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *FOLDERS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip(f"no git checkout to compare with: {listed.stderr.strip()}")
    return {path for path in listed.stdout.split("\0") if path}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, tracked):
    """The wheel built from a copy of what git knows, without the network."""
    source = tmp_path_factory.mktemp("source")
    for path in [*tracked, "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / path).exists():  # deleted, and not yet committed so
            target.write_bytes((REPOSITORY / path).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def metadata_file(wheel, name):
    (path,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_the_wheel_holds_every_tracked_file_and_no_other(wheel, tracked):
    there = {path for path in tracked if (REPOSITORY / path).exists()} - NOT_SHIPPED
    shipped = {n for n in wheel.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    assert shipped - BUILT == {f"rankscope/{path}" for path in there}


def test_a_built_site_is_in_the_wheel_and_served_from_there(tmp_path, tracked):
    source = tmp_path / "source"
    for path in [*tracked, "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        if (REPOSITORY / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes((REPOSITORY / path).read_bytes())
    site = source / "dashboard" / "help"
    for words, folder in (
        (["mkdocs", "build", "--quiet", "--site-dir", str(site)], REPOSITORY),
        (["build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), "."], source),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "installed")
    # Before the editable installation, which is asked for what the path does not have.
    there = {"PYTHONPATH": str(tmp_path / "installed")}
    with Service(tmp_path / "server", environment=there) as service:
        home = httpx.get(f"{service.url}/help", follow_redirects=True)
        assert home.status_code == 200
        assert "default-src 'self'" in home.headers["Content-Security-Policy"]
        page = httpx.get(f"{service.url}/help/kinds/loss.spike/")
        assert page.status_code == 200
        for loaded in re.findall(r'<script src="([^"]+)"', page.text):
            script = httpx.get(urljoin(str(page.url), loaded))
            assert script.status_code == 200, loaded
            assert "javascript" in script.headers["Content-Type"]
        assert httpx.get(f"{service.url}/help/no-such-page/").status_code == 404


def test_every_package_says_that_it_is_typed(tracked):
    assert {f"{folder}/py.typed" for folder in FOLDERS} <= tracked


def test_the_command_is_there(wheel):
    entries = configparser.ConfigParser()
    entries.read_string(metadata_file(wheel, "entry_points.txt"))
    module, _, function = entries["console_scripts"]["rankscope"].partition(":")
    assert f"{module.replace('.', '/')}.py" in wheel.namelist()
    assert function == "main"


def test_extras_of_the_contract_exist(wheel):
    provided = {
        line.split(": ")[1]
        for line in metadata_file(wheel, "METADATA").splitlines()
        if line.startswith("Provides-Extra: ")
    }
    assert {"server", "postgres", "tensorflow", "demo", "dev"} <= provided


def test_extras_that_are_named_exist():
    """What a hint tells people to install is there to be installed."""
    named = set()
    for folder in (*FOLDERS, "docs", "examples"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                text = path.read_text(encoding="utf-8")
                for extras in re.findall(r"rankscope\[([a-z, ]+)\]", text):
                    named |= {extra.strip() for extra in extras.split(",")}
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"server", "mcp", "tensorflow"} <= named
    assert named <= set(extras["project"]["optional-dependencies"])


def test_the_agent_alone_is_light(wheel):
    required = {
        canonicalize_name(Requirement(line.split(": ", 1)[1]).name)
        for line in metadata_file(wheel, "METADATA").splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"msgpack", "numpy", "platformdirs", "urllib3"}


def pins():
    """Pinned versions in constraints.txt: of every package, and of those for CUDA alone."""
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    always, heading, for_cuda = text.partition("# Needed by torch's CUDA build alone")
    assert heading

    def read(part):
        lines = [line for line in part.splitlines()[1:] if line and not line.startswith("#")]
        return {canonicalize_name(n): v for n, v in (line.split("==") for line in lines)}

    return {**read(always), **read(for_cuda)}, read(for_cuda)


def needed(name, extras, found):
    """Adds `name` and, in turn, all it needs here to `found`."""
    key = (canonicalize_name(name), frozenset(extras))
    if key in found:
        return
    try:
        found[key] = distribution(name)
    except PackageNotFoundError:
        found[key] = None
        return
    for line in found[key].requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in {*extras, ""}):
            needed(requirement.name, requirement.extras, found)


def test_development_packages_are_pinned_and_nothing_else_is():
    # From the file: the metadata of an editable install is that of the day it was made.
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {}
    for line in [*project["dependencies"], *extras["dev"]]:
        requirement = Requirement(line)
        if requirement.name != "rankscope":
            needed(requirement.name, requirement.extras, found)
            continue
        for extra in requirement.extras:
            for inner in extras[extra]:
                other = Requirement(inner)
                if other.name != "rankscope":
                    needed(other.name, other.extras, found)
    missing = sorted(name for (name, _), installed in found.items() if installed is None)
    assert missing == [], "not installed: run `make install`"
    pinned, for_cuda = pins()
    names = {name for name, _ in found}
    assert names - set(pinned) == set(), "not pinned in constraints.txt"
    # On other systems fewer are needed: what is only pinned is checked where all of them apply.
    if (sys.platform, platform.machine(), sys.version_info[:2]) == ("linux", "x86_64", (3, 11)):
        if torch.version.cuda is None:
            assert names & set(for_cuda) == set(), "pinned as of CUDA alone, and needed without"
            names |= set(for_cuda)
        assert set(pinned) - names == set(), "pinned in constraints.txt, and nobody needs it"


def test_torch_is_the_one_that_everything_was_measured_with():
    assert pins()[0]["torch"] == "2.13.0"


def test_the_triton_of_development_is_that_of_the_cuda_build():
    """So that what passes beside the CPU build of torch passes beside the other one."""
    if torch.version.cuda is None:
        pytest.skip("the CPU build of torch names no Triton")
    needed_by_torch = [Requirement(line) for line in distribution("torch").requires]
    (triton,) = [r for r in needed_by_torch if r.name == "triton"]
    assert triton.specifier.contains(pins()[0]["triton"])
