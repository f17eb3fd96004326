"""The documentation says what the code does, and shows nothing that does not work."""

import ast
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rankscope.agent.cli import COMMANDS, main
from rankscope.agent.options import OPTIONS
from rankscope.server.demo.faults import FAULTS
from rankscope.server.detectors import DETECTORS

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TEXTS = sorted(
    path
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    if path.name != "LICENSE"
)


def generator():
    """The module docs/generate.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = generator().PAGES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_what_the_code_says(path):
    assert path.read_text(encoding="utf-8") == PAGES[path](), "call `make docs`"


def test_every_kind_that_is_looked_for_is_described():
    page = (REPOSITORY / "docs" / "detectors.md").read_text(encoding="utf-8")
    for detector in DETECTORS:
        for kind in detector.kinds:
            assert f"`{kind}`" in page


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_readme_names_every_option(option):
    assert f"`{option.name}`" in README


@pytest.mark.parametrize("fault", FAULTS)
def test_the_readme_names_every_fault(fault):
    assert f"`{fault}`" in README


def code_blocks(language):
    """Blocks of the README in a language, without the fence."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_python_in_the_readme_is_python():
    blocks = code_blocks("python")
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_make_targets_that_are_named_exist():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    for path in TEXTS:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), flags=re.MULTILINE))
        assert named <= targets, path.name
    assert {"install", "test", "check", "fix", "demo"} <= targets
    assert "make demo" in README
    assert "make test" in README


def test_ci_calls_what_developers_call():
    script = REPOSITORY / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    called = re.findall(r"^make (\w+)", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert called == ["install", "check", "test"]


def named_commands():
    """Each `rankscope ...` in our texts: file, words."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"(?:^|`|run: )(rankscope [a-z][^`\n]*)", text, flags=re.MULTILINE):
            yield path.name, shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", line))


def test_commands_and_flags_that_are_shown_exist(capsys):
    helps = {}
    for name, words in named_commands():
        assert words[1] in {c.name for c in COMMANDS}, f"{name}: {' '.join(words)}"
        # An action has options of its own.
        command = tuple(words[1:3] if words[1] == "db" else words[1:2])
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        if flags and command not in helps:
            # In this process: `tests/test_contract.py` asks real ones.
            with pytest.raises(SystemExit, match="^0$"):
                main([*command, "--help"])
            helps[command] = capsys.readouterr().out
        for flag in flags:
            assert flag in helps[command], f"{name}: {' '.join(words)}"


def test_links_inside_the_repository_lead_somewhere():
    for path in TEXTS:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_example_is_its_plain_version_and_three_lines():
    def lines(name):
        text = (REPOSITORY / "examples" / name).read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line.strip()]

    with_agent, plain = lines("train_ddp.py"), lines("train_ddp_plain.py")
    added = [line for line in with_agent if line.endswith("# rankscope")]
    assert len(added) == 3
    assert [line for line in with_agent if line not in added] == plain
    # The three that the README shows.
    assert "from rankscope import agent" in README
    for call in ("agent.attach(model, optimizer)", "monitor.log("):
        assert call in README
        assert any(call in line for line in added)


def test_no_machine_is_named():
    """Paths and hosts of whoever wrote a text are of no use to anybody else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    homes = re.compile(r"/(?:home|Users|root)/\w")
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".html", ".js", ".txt"}:
            assert path.is_symlink() or not path.exists() or not homes.search(path.read_text()), (
                name
            )
