"""Every text that this charm shows, by the package that shows it; what is in braces is filled in there."""

# charm.py
OFFERING = "offering volume {name}"
SERVING = "serving volume {name} from this unit: {usage}; for trials and small teams"
STANDBY = "{server} serves volume {name}; this unit has nothing to do"
STARTING = "starting the servers of the volume"
STOPPED = "stopped, so that the storage can go"
UNFORMATTED = "waiting for the leader to format the volume"
ENGINE = "metadata engine: {problem}"

# relations
NO_PEERS = "waiting for the peer relation"
NO_ADDRESS = "waiting for this machine to have an IP address"
NO_STORAGE = "waiting for storage and for the leader"
NOT_SERVED = "waiting for {server} to serve the volume"
SERVER_REMOVED = "{server}, whose storage holds the volume, was removed: deploy another application"
FOR_GOOD = "metadata-url, bucket: this application's volume is {mode} for good: deploy another application"
CANNOT_MOUNT = "{client} cannot mount JuiceFS: juju remove-relation {app} {client}, and use shared-filesystem-client"
NOT_GRANTED = "waiting for {app} to grant its credentials"
NO_ANSWER = "waiting for {app} to answer on {endpoint}"
UNUSABLE = "{endpoint}: {app} cannot be used: {problem}"
UNUSED_CREDENTIALS = "credentials: only used with metadata-url and bucket: set both, or reset credentials"
NO_ENGINE = "metadata-url: set it too, or reset bucket for an embedded volume"
NO_BUCKET = "bucket: set it too, or reset metadata-url for an embedded volume"
TWO_ENGINES = "{endpoints}: only one metadata engine is possible: remove one of the relations"
OFFERED_TOO = "{option}: {app} offers it too: reset the option, or remove the relation"
NO_ACCESS = "credentials: no access to the secret: juju grant-secret SECRET {app}"
PROVIDED_TOO = "{key}: a related charm provides it: remove it from the secret"
SOCKET = "it offers a socket, which clients on other machines cannot reach"
ENDPOINTS = "its endpoints: {problem}"
HAS_PATH = "it names a path: JuiceFS takes a bucket as a whole; reset the path there"
NO_PLACE = "it names neither an endpoint nor a region: set one of them there"
NOT_HTTPS = "its endpoint is not https://HOST"
NO_CERTIFICATE = "its tls-ca-chain holds something that is no certificate"

# embedded
REFUSED = (
    "{problem}: {remedy}, and Juju's next run of this hook passes; or remove the volume under its clients: "
    "juju config {app} allow-removal=true"
)
UNKNOWN_CLIENTS = "cannot tell which clients have the volume mounted ({problem})"
MOUNTED = "the volume is mounted by {clients}"
CONNECTED = "the volume's metadata server has connections from {clients}"
RECONNECTING = "the metadata server started {seconds:.0f} s ago and clients may reconnect"
AWAITING_UNMOUNT = "{problem}; waiting until it is unmounted"
OTHERS_CAN_WRITE = "{folder} can be written by others than root: chown root, chmod go-w it"
PORT_TAKEN = "another program listens on port {port}: stop it"
NOT_STARTED = "{unit} does not start: {reason}"
USAGE = "{used} of its disk used, {free} free"

# volume: what it should be
BLOCK_SIZE = "a power of two between 64K and 16M, like 4M"
ONE_OF = "one of {choices}"
NEGATIVE = "{option}: 0 or more"
UNKNOWN_KEY = "unknown key {key}; possible: {keys}"
TWO_USERS = "meta-user: metadata-url already names the user: remove one of the two"
NOT_RSA = (  # -traditional: the form that every version of juicefs reads
    "encrypt-key: not an RSA key in PEM with a passphrase: make one with "
    "openssl genrsa -traditional -aes256 -out key.pem 2048"
)
KEY_ALONE = "encrypt-passphrase: required by encrypt-key"
KEYS_IN_BUCKET = "remove the keys from it: they go into a secret, named by the option credentials"
BUCKET = "write it as {example}"

# volume: formatting
NOT_THERE = "the volume is not there after juicefs format"
LOST = (
    "the metadata engine lost volume {name} ({uuid}): restore its backup with the action restore-metadata; it is not "
    "formatted again"
)
NOT_OURS = (
    "the metadata engine holds a volume {name} ({uuid}) that was not made here: if no other application offers it, "
    "take it over with adopt={uuid}; else name another database"
)
OTHER_NAME = "the metadata engine holds volume {found}, not {name}: set volume-name={found}, or name another database"
OTHER_UUID = (
    "the metadata engine holds another volume {name} ({found}) than the one published ({uuid}): it was formatted "
    "again, or metadata-url changed: set the old metadata-url, or deploy another application"
)
OTHER_STORAGE = "storage-type: volume {name} lies in {found}, not {wanted}: set storage-type={found}"
OTHER_BUCKET = "volume {name} keeps its data at {found}, not at {wanted}: bring that address back"
FIXED = "{option}: volume {name} was made with {found}, which cannot change: set {option}={found}"
UNENCRYPTED = "credentials: encrypt-key: volume {name} was made without, which cannot change: remove it from the secret"
NOT_EMPTY = "{reason}: it may be another application's volume; choose another volume-name, bucket or prefix"

# volume: actions
PATH = "an absolute path inside the volume is needed, like /datasets"
FILE = "an absolute path on this unit is needed, like /tmp/backup.json.gz"
NOT_LEADER = "run it on the leader: the unit with a * in juju status"
OTHER_VOLUME = "uuid: this application's volume is {uuid}: deploy another application for another"
FAILED = "{command}: {reason}; its whole report: {report}"
BACKUP_OF_OTHER = "the backup is of volume {found}, not {uuid}: it is not kept"
EMBEDDED = "an embedded volume keeps its metadata in the unit's storage, in Redis' append-only log: bring that back"
NO_FILE = "file: {file} is not there: juju scp BACKUP UNIT:/tmp/ first"
OTHER_BACKUP = "uuid: {file} is a backup of volume {found}, not {uuid}"
OCCUPIED = "the metadata engine holds volume {name} ({uuid}): a backup goes into an empty one only"
NOT_RESTORED = "after load the metadata engine does not hold volume {uuid}; the report: {report}"
NO_LIMIT = "capacity, inodes: set one of them, or remove=true"
NO_QUOTA = "path: juicefs knows no quota of {path} after it was set"
DRY_RUN = "dry run: nothing was deleted; delete=true does"
KUBERNETES_NAME = "{parameter}: letters a-z, digits and hyphens, 52 at most, with no hyphen at either end"
KUBERNETES_SIZE = "size: a number and one of Ki, Mi, Gi, Ti and Pi, like 100Gi"
NO_FUSE = "/dev/fuse does not open here: run the action benchmark of shared-filesystem-client"
NO_FIGURES = "juicefs bench returned unexpected output"
NOT_MOUNTED = "mount: {reason}"
