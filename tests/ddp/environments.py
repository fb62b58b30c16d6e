"""Virtual and conda environments with nothing but a working interpreter."""

import pathlib


def make(
    place: pathlib.Path, kind: str = "venv", torch: str | None = "2.6.0", agent: str = ""
) -> pathlib.Path:
    """Make an environment with `agent`, a shell script, as interpreter; `system` adds packages."""
    files = {
        "bin/python3": f"#!/bin/bash\n{agent}\n",
        "conda-meta/x" if kind == "conda" else "pyvenv.cfg": "",
    }
    if kind == "system":
        files["pyvenv.cfg"] = f"home = {place}/base/bin\ninclude-system-site-packages = true\n"
        make(place / "base", torch=torch)
    elif torch is not None:
        files["lib/python3.12/site-packages/torch/version.py"] = (
            f"import x\n\n__version__ = '{torch}'\ncuda: str\n"
        )
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "bin" / "python3").chmod(0o700)
    (place / "bin" / "python").symlink_to("python3")
    return place / "bin" / "python"
