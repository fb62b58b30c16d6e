"""The real apt over a recorded package index: it resolves, and installs nothing.

The index holds the driver's packages only, so apt does not see their dependencies on other
packages. Packages of two branches conflict, as in the archives.
"""

import collections.abc
import functools
import pathlib
import re
import subprocess
import tempfile

Offers = collections.abc.Mapping[str, tuple["Offer", ...]]
Offer = tuple[str, str]  # version, and Depends as in a control file
_BRANCH = re.compile(r"(?<=-)\d{3}(?=-|$)")
_DIRECTORIES = (
    "etc/apt/sources.list.d",
    "etc/apt/preferences.d",
    "var/lib/apt/lists/partial",
    "var/lib/dpkg",
)


def run(
    words: collections.abc.Iterable[str],
    offers: Offers,
    installed: collections.abc.Mapping[str, str],
    held: collections.abc.Iterable[str] = (),
) -> tuple[int, str, str]:
    """Run apt-get or apt-cache as a machine with these packages; return its status and output."""
    command = list(words)
    pins = ""
    for word in command:
        if word.startswith("Dir::Etc::Preferences="):
            pins = pathlib.Path(word.partition("=")[2]).read_text()
    kept = tuple(
        "Dir::Etc::Preferences=" if word.startswith("Dir::Etc::Preferences=") else word
        for word in command
    )
    return _run(
        kept,
        pins,
        _packages(tuple(sorted(offers.items()))),
        tuple(sorted(installed.items())),
        frozenset(held),
    )


@functools.cache
def _run(
    command: tuple[str, ...],
    pins: str,
    packages: str,
    installed: tuple[tuple[str, str], ...],
    held: frozenset[str],
) -> tuple[int, str, str]:
    stanzas: dict[tuple[str, str], str] = {}
    for stanza in packages.split("\n\n"):
        match = re.match(r"Package: (\S+)\nVersion: (\S+)", stanza)
        if match:
            stanzas[match[1], match[2]] = stanza
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in _DIRECTORIES:
            (root / name).mkdir(parents=True)
        (root / "etc/apt/sources.list").touch()
        (root / "Packages").write_text(packages)
        (root / "pins").write_text(pins)
        there = ""
        for name, number in installed:
            fields = stanzas.get(
                (name, number), f"Package: {name}\nVersion: {number}\nArchitecture: amd64\n"
            ).strip()
            there += f"{fields}\nStatus: {'hold' if name in held else 'install'} ok installed\n\n"
        (root / "var/lib/dpkg/status").write_text(there)
        status = f"-oDir::State::status={root}/var/lib/dpkg/status"
        options = (
            f"--with-source={root}/Packages",
            f"-oDir={root}",
            status,
            "-oAPT::Architecture=amd64",
        )
        words = [
            f"{word}{root}/pins" if word == "Dir::Etc::Preferences=" else word
            for word in command[1:]
        ]
        done = subprocess.run(
            [command[0], *options, "-oAPT::Architectures=amd64", *words],
            capture_output=True,
            text=True,
            env={"LANG": "C.UTF-8"},
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@functools.cache
def _packages(offers: tuple[tuple[str, tuple[Offer, ...]], ...]) -> str:
    """Return the index as apt reads it."""
    known = {name for name, _ in offers}
    stanzas: list[str] = []
    for name, versions in offers:
        for number, depends in versions:
            clauses = [clause.strip() for clause in depends.split(",") if clause.strip()]
            clauses = [clause for clause in clauses if _is_known(clause, known)]
            text = f"Package: {name}\nVersion: {number}\nArchitecture: amd64\nFilename: {name}.deb\nSize: 1\n"
            text += f"Depends: {', '.join(clauses)}\n" if clauses else ""
            family = _BRANCH.sub("branch", name)
            provides = [f"{name}-{re.split('[-+]', number)[0]}"]
            if family != name and not name.startswith(("linux-", "nvidia-firmware-")):
                provides.append(family)
                text += f"Conflicts: {family}\nReplaces: {family}\n"
            text += f"Provides: {', '.join(provides)}\n"
            stanzas.append(text)
    return "\n".join(stanzas)


def _is_known(clause: str, known: set[str]) -> bool:
    """Whether the index has a package of a clause such as `a (>= 1) | b`."""
    names = {one.split()[0] for one in clause.split("|")}
    return bool(names & known)
