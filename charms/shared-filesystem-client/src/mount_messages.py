"""The texts of this charm's statuses, failures and log lines: what failed, why, what to type."""

# Options of the charm
PROFILE = "profile: {given!r} is none of {known}"
SUBDIRECTORY = "subdirectory: a folder of the filesystem, like team/a, without . and .. in it"
NO_MOUNTPOINT = "mountpoint: say where to mount: juju config {app} mountpoint=/mnt/shared"
MOUNTPOINT_FORM = "an absolute path of letters, digits and ._+@- is needed, like /mnt/shared"
MOUNTPOINT_OF_SYSTEM = "{path} belongs to the system: mount elsewhere, like /mnt/shared"
MOUNTPOINT_CONTRADICTION = "mountpoint: {option} is wanted, and {request} by {app}: reset the option"
OPTION_REFUSED = "mount-options: {name} is refused: {why}"
OPTION_OF_UNIT = "mount-options: {name!r} is refused: the unit is the charm's"
OPTION_UNKNOWN = "mount-options: {name!r} is not one that this filesystem takes"
OPTION_WITHOUT_VALUE = "mount-options: {name} takes no value"
OPTION_VALUE = "mount-options: {name}={value!r} is not possible; it must match {pattern}"
OPTION_TOO_NEW = "mount-options: {flag} needs juicefs {since} or newer, and this is {version}"
CACHE_SIZE = "cache-size: auto, or a number of MiB, or one with G or T behind it, like 200G; 0 keeps no copies"
CACHE_TWICE = "cache-directories: a folder is named twice"
CACHE_PLACE = "cache-directories: {directory} lies on {fstype}: name folders of a local disk"
BUFFER_SIZE = "buffer-size: 32 MiB at least, or 0 for the profile's"
METRICS_PORT = "metrics-port: a port from 1024 to 65535, or 0 for the first free one from 9567 on"
LUSTRE_REPOSITORY = (
    "lustre-repository: {given!r} is none of {known}, nor a line of sources.list: deb URL SUITE COMPONENT"
)
LUSTRE_ONE_LINE = "lustre-repository: one line of sources.list, without a line break"
LUSTRE_PACKAGES = (
    "lustre-packages: say what your repository calls the client, for example "
    "lustre-client-modules-{kernel} lustre-client-utils"
)
LUSTRE_PACKAGE = "lustre-packages: {word!r} is no package's name; only {{kernel}} is filled in"
LUSTRE_CHECKSUM = (
    "lustre-checksum: EXAScaler's servers hand out their client over HTTP, unsigned: give the SHA-256 of "
    "http://SERVER/client-setup-tool, 64 hexadecimal digits"
)
LNET_NETWORKS = "lnet-networks: networks with their interfaces, like tcp1(eth0) or o2ib(ib0),tcp(eth0)"

# Relations
NOTHING_TO_MOUNT = "nothing to mount: juju integrate {app}:filesystem PROVIDER:filesystem"
NO_OFFER = "waiting for {app} to offer a filesystem"
BAD_OFFER = "{app} offers what cannot be mounted: {error}"
NO_GRANT = "waiting for {app} to grant its credentials"
BAD_CREDENTIALS = "{app} offers unusable credentials: {error}"
NO_CEPH_KEY = "{app} offers a secret without the key of Ceph's user"
NO_REQUEST = "waiting for {app} to say where it needs a mount"
BAD_REQUEST = "{app} asks for a mount in an unknown format: {error}"

# A mount, by what a probe found
MOUNTING = "mounting {source} at {mountpoint}"
MOUNTED = "{source} is mounted at {mountpoint}"
PENDING = "; restart pending: a change waits until nobody uses it"
SLOW_NOW = "; writes are slow now"
SLOW_FOR_LONG = "{detail}; look at what stores the data of {source}"
OTHER_SETTINGS = "{detail}; the change waits until nobody uses it"
OTHER_MOUNT = "{detail}: unmount it, or choose another mountpoint"
NOT_MOUNTED = "{source} does not mount: {reason}"
HUNG = "{mountpoint} does not answer{since}"
SERVER_DOWN = "{problem}{since}; the mount waits for it"
REMOUNTING = "{detail}; mounting it anew"
EXPOSED = "others can replace folders in it (mode {mode:04o}, no sticky bit): {remedy}"
MAKE_STICKY = "chmod +t {mountpoint}, as root where it is neither read-only nor root squashed"
NO_REASON = "its journal is empty"
BLOCKS_KEPT = "blocks that were never uploaded are kept in {paths}"
RIVAL = "application {app} mounts at {mountpoint}: choose another mountpoint"
FOLDER_REFUSED = "mountpoint {mountpoint} cannot be made: {error}"
NO_FOLDER = "mountpoint {mountpoint} lies behind a symbolic link, or is no folder: choose another"
FOLDER_FULL = "mountpoint {mountpoint} holds files, which {source} would hide: move them away"
LINE_BREAK = "{name} has a line break in it"

# Machines and filesystems
NO_FUSE = "/dev/fuse does not open ({error}): JuiceFS needs it; let this machine have it"
VOLUME_TOO_OLD = (
    "volume {name} is offered by juicefs {version}, which is too old: attach {oldest} or newer to the application that "
    "offers it"
)
VOLUME = "volume {name}: {report}"
FOLDERS_UNKNOWN = "volume {name}: the modes of the folders on the way to {folder} are not known: {error}"
SPACE_IN_SOURCE = "what {kind} should mount has a space in its name, which systemd cannot mount"
UNPRIVILEGED = (
    "{kind} cannot be mounted in an unprivileged container ({container}): deploy to a virtual machine (--constraints "
    "virt-type=virtual-machine), or set security.privileged=true on the container"
)
HOST_WITHOUT_MODULE = (
    "this container's machine has not loaded {kind}, and a container cannot: run modprobe {module} on the machine "
    "below it"
)
NO_MODULE = "the kernel {release} has no {kind} (module {module}): {error}"
CEPH_NAME = "the Ceph {what} has other characters than letters, digits and ._- in it"
CEPH_KEY = "the Ceph key is not base64: it is what `ceph auth print-key client.USER` prints"
NO_MONITOR = "the Ceph monitor {host} has no address ({error})"
LUSTRE_NID = "a Lustre server's identifier is ADDRESS@NETWORK, like 10.0.0.2@tcp1 or @o2ib"
NO_LUSTRE = (
    "there is no Lustre client for kernel {kernel} here{others}: say where one comes from: lustre-repository={known}, "
    "or a line of your own"
)
NO_LUSTRE_MODULES = (
    "{repository} installed no modules for the running kernel {kernel}{others}: boot a kernel that it has them for"
)
ONLY_FOR = " (only for {kernels})"
NO_LUSTRE_PACKAGE = "the repository has no Lustre client for kernel {kernel}"
CLOSE_KERNEL = "; it has one for {kernel}: boot that kernel"
NEWEST_KERNEL = "; its newest is for {kernel}: boot that kernel, or choose another repository"
LNET_MOUNTED = "LNet runs on {running}, and {wanted} is wanted: unmount all Lustre here, or reboot"
LNET_IN_USE = "LNet cannot change to {wanted} while it is in use: reboot ({error})"
OTHER_CHECKSUM = "lustre-checksum: {host} hands out a client-setup-tool of SHA-256 {found}"

# Actions
NO_CACHE = "only a JuiceFS mount keeps copies on the local disk that could be fetched ahead"
WARMUP_RUNS = "a warm-up runs already: juju ssh to the machine and systemctl stop {unit}, or wait for it"
WARMUP_FAILED = "warmup did not complete within {deadline} s: {output}"
UNMOUNTED = "{mountpoint} was unmounted meanwhile"
IN_USE = (
    "{mountpoint} is in use by {users}: drain the node and wait (wait=SECONDS), or take it away from them with "
    "force=true: what they have open then fails"
)
READ_ONLY = "the mount is read-only: nothing can be written there"
DISK_FULL = "size: the local disk has {free} MiB free: {most} at most"
BENCHMARK_LATE = "deadline: it passed before the benchmark was through: ask for a smaller size"
PATH_OUTSIDE = "path: it must lie in {mountpoint}: give it relative to that, like datasets/owt"
PATH_MISSING = "path: {path} does not exist"
PATH_ESCAPES = "path: {path} leads out of {mountpoint}"
