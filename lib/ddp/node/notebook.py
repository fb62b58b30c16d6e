"""The batch script of `ddp notebook`: JupyterLab on this node, until the job ends.

Its token and its own files are in a folder on the node's own disk; the run's folder has the URL
with the token, in a file of mode 0600. Both are removed at the end.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time

from ddp.node import exit_codes, network, session, slurm_calls, spec, spool, unpacking

URL, ABOUT = "url", "control/notebook.json"
_PORTS = range(20000, 30000)  # below the ephemeral ports of outgoing connections
_START_S = 300.0  # imports from a cold disk
_END_S = 15.0  # for kernels to end, of the 30 s that Slurm gives
# Runs ipykernel of the notebook's environment with the Python of another one, whose own packages
# come first. Compiled parts fit the same version of Python only
_KERNEL = """\
import site, sys
site.addsitedir({site!r})
try:
    from ipykernel import kernelapp
except ImportError as e:
    sys.exit(f"{{sys.executable}} cannot run the notebook's ipykernel ({{e}}); install ipykernel there")
kernelapp.launch_new_instance()
"""


class Notebook:
    """A notebook server of one job."""

    def __init__(self, job: spec.JobSpec, env: dict[str, str]) -> None:
        self._job = job
        self._host = env["SLURMD_NODENAME"]
        self._number = env["SLURM_JOB_ID"]
        self._place = spool.folder(job.cache, self._number, "notebook")
        self._server: subprocess.Popen[bytes] | None = None
        self.is_asked_to_end = False

    def run(self) -> int:
        """Serve until someone ends it; return the exit code. Raises FatalError."""
        self._listen()
        job = self._job
        ready = session.prepare(job, self._host, f"{job.job_dir}/control")
        assert job.jupyter is not None
        python, locks = unpacking.use(job.jupyter, self._host, f"{job.job_dir}/control")
        if python != ready.python.path:
            self._write_kernel(ready.python.path, python)

        address = self._address()
        token = secrets.token_urlsafe(32)
        self._configure(address, _free_port(address), token, ready.folder)
        argv = [python, "-m", "jupyterlab", f"--config={self._place}/config.json"]
        env = self._variables(ready.env)
        inherited = (*locks, *ready.python.locks)
        self._server = subprocess.Popen(argv, env=env, cwd=ready.folder, pass_fds=inherited)
        if self.is_asked_to_end:  # meanwhile
            self._server.terminate()
        port = self._await_port(self._server)
        if port:
            self._announce(address, port, token)
        return exit_codes.exit_code(self._server.wait())

    def close(self, *, leaves_log: bool) -> None:
        """Remove the files on the node's own disk and the URL, or the whole folder of the run."""
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self._place))
        if not leaves_log:
            shutil.rmtree(self._job.job_dir, ignore_errors=True)
            return
        for name in (URL, ABOUT):
            with contextlib.suppress(OSError):
                os.unlink(f"{self._job.job_dir}/{name}")

    def _listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGUSR1, self._on_warning)

    def _on_term(self, _number: int, _frame: object) -> None:
        """End the server, and its kernels with it."""
        self.is_asked_to_end = True
        if self._server is not None:
            self._server.terminate()
            signal.signal(signal.SIGALRM, self._on_late)
            signal.setitimer(signal.ITIMER_REAL, _END_S)

    def _on_late(self, _number: int, _frame: object) -> None:
        if self._server is not None:
            self._server.kill()

    def _on_warning(self, _number: int, _frame: object) -> None:
        spool.write("[ENV] the time limit is near: save your notebooks")

    def _address(self) -> str:
        """Return this node's address in Slurm, which the login host can reach.

        Raises FatalError.
        """
        shown = slurm_calls.show_nodes(self._host, [self._host])
        given = network.node_address(self._host, shown)
        if given not in network.addresses():
            raise exit_codes.FatalError(
                f"{given}, the node's NodeAddr in Slurm, is not its address"
            )
        return given

    def _configure(self, address: str, port: int, token: str, folder: str) -> None:
        """Write the server's configuration, which only this account can read."""
        settings = {
            "ServerApp": {
                "ip": address,
                "port": port,
                "open_browser": False,
                "root_dir": folder,
                "answer_yes": True,
            },
            "IdentityProvider": {"token": token},
            # Locks of SQLite may hang on a network filesystem
            "NotebookNotary": {"db_file": ":memory:"},
            "LabApp": {
                "check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
                "news_url": None,
            },
        }
        _write_private(f"{self._place}/config.json", json.dumps(settings))

    def _variables(self, env: dict[str, str]) -> dict[str, str]:
        """Return the server's variables: its own files are on the node's disk."""
        found = dict(env)
        found["JUPYTER_RUNTIME_DIR"] = f"{self._place}/runtime"
        found["JUPYTER_PATH"] = ":".join(
            filter(None, (f"{self._place}/share", env.get("JUPYTER_PATH")))
        )
        if not os.path.isdir(env.get("HOME", "")):
            found["HOME"] = self._place
        return found

    def _write_kernel(self, python: str, server: str) -> None:
        """Write the kernel of the job's own environment in place of the server's."""
        site = _site(server)
        program = _KERNEL.format(site=site)
        kernel = {
            "argv": [python, "-c", program, "-f", "{connection_file}"],
            "display_name": "Python (the job's environment)",
            "language": "python",
            "metadata": {"debugger": True},
        }
        folder = f"{self._place}/share/kernels/python3"
        os.makedirs(folder, 0o700)
        _write_private(f"{folder}/kernel.json", json.dumps(kernel))

    def _await_port(self, server: "subprocess.Popen[bytes]") -> int:
        """Wait until the server listens, and return its port; 0 if it has ended.

        Raises FatalError.
        """
        deadline = time.monotonic() + _START_S
        path = f"{self._place}/runtime/jpserver-{server.pid}.json"
        while server.poll() is None:
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                return int(json.load(file)["port"])
            if time.monotonic() > deadline:
                server.kill()
                raise exit_codes.FatalError(f"JupyterLab did not start within {_START_S:.0f} s")
            time.sleep(0.2)
        return 0

    def _announce(self, address: str, port: int, token: str) -> None:
        """Tell the command where the server is, and only the user its token."""
        url = f"http://localhost:{port}/lab?token={token}\n"
        _write_private(f"{self._job.job_dir}/{URL}", url)
        about = {"node": self._host, "address": address, "port": port}
        _write_private(f"{self._job.job_dir}/{ABOUT}", json.dumps(about))
        spool.write(f"[ENV] JupyterLab listens on {self._host}, {address}:{port}")


def main(spec_path: str) -> int:
    """Run a notebook's job and return its exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    os.chdir("/")  # Slurm's choice is removed at the end
    notebook = Notebook(job, dict(os.environ))
    code = exit_codes.FATAL
    try:
        code = notebook.run()
    except exit_codes.FatalError as e:
        spool.write(f"[FATAL] {os.environ['SLURMD_NODENAME']}: {e}")
    finally:
        notebook.close(leaves_log=code != 0 and not notebook.is_asked_to_end)
    return 0 if notebook.is_asked_to_end else code


def _free_port(address: str) -> int:
    """Choose a port at random; the server takes the next ones while it is taken."""
    for _ in range(20):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise exit_codes.FatalError(f"no port of {address} is free")


def _site(python: str) -> str:
    """Return the folder of an environment's packages."""
    above = os.path.dirname(os.path.dirname(python))
    lib = f"{above}/lib"
    version = next(name for name in sorted(os.listdir(lib)) if name.startswith("python3"))
    return f"{lib}/{version}/site-packages"


def _write_private(path: str, text: str) -> None:
    """Write a file that only this account can read; readers see all of it or none."""
    partial = f"{path}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(partial, path)
