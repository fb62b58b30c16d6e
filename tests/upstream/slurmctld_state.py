"""The state of upstream's slurmctld charm in a small cluster."""

from ops import testing

PEER = testing.PeerRelation(
    "slurmctld-peer",
    interface="slurmctld-peer",
    local_app_data={"cluster_name": '"ddp"', "restart_signal": '""'},
)
SLURMD = testing.Relation(
    "slurmd",
    interface="slurmd",
    remote_app_name="slurmd",
    remote_app_data={"partition": '{"partitionname": "slurmd", "nodes": ["slurmd"]}'},
)
SACKD = testing.Relation("sackd", interface="sackd", remote_app_name="sackd")
SLURMDBD = testing.Relation(
    "slurmdbd",
    interface="slurmdbd",
    remote_app_name="slurmdbd",
    remote_app_data={"hostname": '"juju-2586ad-1"'},
)
SLURMRESTD = testing.Relation("slurmrestd", interface="slurmrestd", remote_app_name="slurmrestd")
AUTH = testing.Secret({"key": "a2V5", "keyid": "1"}, label="slurm-auth-key", owner="app")
JWT = testing.Secret({"key": "pem"}, label="slurm-jwt-key", owner="app")
STATE = testing.State(
    leader=True,
    planned_units=1,
    config={"cluster-name": "ddp", "default-partition": "slurmd"},
    relations={PEER, SLURMD, SACKD, SLURMDBD, SLURMRESTD},
    secrets={AUTH, JWT},
)
