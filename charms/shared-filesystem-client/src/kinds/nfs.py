"""Draws up the mount of an NFS export: one mount unit of systemd's."""

import re

import mount_plan
from kinds import kernel, presets
from slurm_ddp.interfaces import filesystem_info as fs

_PORT = 2049
_NO_LOCKS = """mount-options: vers=3 has no locks without further services: add nolock, and locks hold on one machine \
only, or mount by vers=4"""


def plan(spec: mount_plan.Spec, export: fs.Nfs) -> mount_plan.Plan:
    """Draw up the mount of an export."""
    options = presets.merge(
        presets.NFS, profile=spec.profile, given=spec.mount_options, holding=spec.holding
    )
    options = _protocol(_version(options), is_ipv6=":" in export.host)
    kind = kernel.NFS3 if options["vers"] == "3" else kernel.NFS
    kernel.check(kind)
    if export.port is not None:
        options = {"port": str(export.port)} | options
    # As the kernel shows it
    path = re.sub("/+", "/", kernel.below(export.path, spec.subdirectory)).rstrip("/") or "/"
    servers = (
        ()
        if options["proto"].startswith("rdma")
        else (((export.host, int(options.get("port", _PORT))),),)
    )
    source = f"{fs.join_address(export.host, None)}:{path}"
    remedy = f"chmod +t {path}, on {export.host}"
    return kernel.plan(
        spec, kind=kind, source=source, options=options, servers=servers, remedy=remedy
    )


def _version(options: presets.Options) -> presets.Options:
    """Return the options with one `vers`, from any of nfs(5)'s three forms; or `OptionError`."""
    given = {options.pop(name) for name in ("vers", "nfsvers") if name in options}
    minor = options.pop("minorversion", "")
    versions = set(given)
    if minor and "4" in versions:
        versions.remove("4")
        versions.add(f"4.{minor}")
    if len(versions) > 1 or (minor and versions != {f"4.{minor}"}):
        raise presets.OptionError(
            "mount-options: vers, nfsvers and minorversion contradict each other"
        )
    (version,) = versions
    if version == "3" and "nolock" not in options:
        raise presets.OptionError(_NO_LOCKS)
    if version != "3" and "nolock" in options:
        raise presets.OptionError(f"mount-options: nolock is rejected: {presets.REFUSED['nolock']}")
    return {"vers": version} | options


def _protocol(options: presets.Options, *, is_ipv6: bool) -> presets.Options:
    """Return the options with one `proto` for the address: a plain `tcp` is IPv4 only (nfs(5))."""
    flags = [name for name in ("tcp", "rdma") if name in options and options.pop(name) == ""]
    proto = options.get("proto", flags[-1] if flags else "tcp")
    return options | {"proto": f"{proto}6" if is_ipv6 and not proto.endswith("6") else proto}
