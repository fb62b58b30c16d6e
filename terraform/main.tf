# The bundle as one Terraform module: the applications, options and relations of bundle.yaml, which a test compares.

resource "juju_application" "mysql" {
  name       = "mysql"
  model_uuid = var.model_uuid

  charm {
    name    = "mysql"
    base    = "ubuntu@22.04" # the only base of its 8.0 track
    channel = "8.0/stable"
  }

  config      = var.mysql.config
  constraints = var.mysql.constraints
  machines    = var.mysql.machines
  units       = 1
}

module "slurmctld" {
  source = "git::https://github.com/canonical/slurm-charms//charms/slurmctld/terraform?ref=track/25.11"

  app_name = "slurmctld"
  base     = var.base
  channel  = var.slurm_channel
  config = merge({
    cluster-name      = "ddp"
    default-partition = "slurmd"
    # A lost node is noticed after one minute, and a job that it ends is queued for half a minute: docs/howto/resume.md
    slurm-conf-parameters = "SlurmdTimeout=60\nAuthInfo=cred_expire=30\n"
  }, var.slurmctld.config)
  constraints = var.slurmctld.constraints
  machines    = var.slurmctld.machines
  model_uuid  = var.model_uuid
  units       = 1
}

module "slurmdbd" {
  source = "git::https://github.com/canonical/slurm-charms//charms/slurmdbd/terraform?ref=track/25.11"

  app_name    = "slurmdbd"
  base        = var.base
  channel     = var.slurm_channel
  config      = var.slurmdbd.config
  constraints = var.slurmdbd.constraints
  machines    = var.slurmdbd.machines
  model_uuid  = var.model_uuid
  units       = 1
}

module "slurmrestd" {
  source = "git::https://github.com/canonical/slurm-charms//charms/slurmrestd/terraform?ref=track/25.11"

  app_name    = "slurmrestd"
  base        = var.base
  channel     = var.slurm_channel
  config      = var.slurmrestd.config
  constraints = var.slurmrestd.constraints
  machines    = var.slurmrestd.machines
  model_uuid  = var.model_uuid
  units       = 1
}

module "slurmd" {
  source = "git::https://github.com/canonical/slurm-charms//charms/slurmd/terraform?ref=track/25.11"

  app_name    = "slurmd"
  base        = var.base
  channel     = var.slurm_channel
  config      = merge({ default-node-state = "idle" }, var.slurmd.config)
  constraints = var.slurmd.constraints
  machines    = var.slurmd.machines
  model_uuid  = var.model_uuid
  units       = var.slurmd.units
}

module "sackd" {
  source = "git::https://github.com/canonical/slurm-charms//charms/sackd/terraform?ref=track/25.11"

  app_name    = "sackd"
  base        = var.base
  channel     = var.slurm_channel
  config      = var.sackd.config
  constraints = var.sackd.constraints
  machines    = var.sackd.machines
  model_uuid  = var.model_uuid
  units       = 1
}

module "juicefs_server_proxy" {
  source = "../charms/juicefs-server-proxy/terraform"
  count  = var.juicefs_server_proxy == null ? 0 : 1

  base               = var.base
  channel            = var.channel
  config             = var.juicefs_server_proxy.config
  constraints        = var.juicefs_server_proxy.constraints
  machines           = var.juicefs_server_proxy.machines
  model_uuid         = var.model_uuid
  resources          = var.juicefs_server_proxy.resources
  revision           = var.juicefs_server_proxy.revision
  storage_directives = var.juicefs_server_proxy.storage_directives
}

module "shared_filesystem_client" {
  source = "../charms/shared-filesystem-client/terraform"

  base       = var.base
  channel    = var.channel
  config     = merge({ mountpoint = "/mnt/shared" }, var.shared_filesystem_client.config)
  model_uuid = var.model_uuid
  resources  = var.shared_filesystem_client.resources
  revision   = var.shared_filesystem_client.revision
}

module "slurm_gpu" {
  source = "../charms/slurm-gpu/terraform"

  base       = var.base
  channel    = var.channel
  config     = var.slurm_gpu.config
  model_uuid = var.model_uuid
  revision   = var.slurm_gpu.revision
}

module "slurm_gpu_controller" { # the same charm in its controller role: it merges the nodes' lines into gres.conf
  source = "../charms/slurm-gpu/terraform"

  app_name   = "slurm-gpu-controller"
  base       = var.base
  channel    = var.channel
  model_uuid = var.model_uuid
  revision   = var.slurm_gpu.revision
}

module "trainer" {
  source = "../charms/ddp-trainer/terraform"

  base       = var.base
  channel    = var.channel
  config     = merge({ workspace = "/mnt/shared" }, var.trainer.config)
  model_uuid = var.model_uuid
  resources  = var.trainer.resources
  revision   = var.trainer.revision
}

locals {
  filesystem = var.filesystem != null ? var.filesystem : { name = "juicefs-server-proxy", endpoint = "filesystem" }

  # The name of each integration, and its two ends as "application:endpoint"
  integrations = {
    slurmdbd-mysql        = ["slurmdbd:database", "mysql:database"]
    slurmctld-slurmdbd    = ["slurmctld:slurmdbd", "slurmdbd:slurmctld"]
    slurmctld-slurmrestd  = ["slurmctld:slurmrestd", "slurmrestd:slurmctld"]
    slurmctld-slurmd      = ["slurmctld:slurmd", "slurmd:slurmctld"]
    slurmctld-sackd       = ["slurmctld:sackd", "sackd:slurmctld"]
    filesystem            = ["shared-filesystem-client:filesystem", "${local.filesystem.name}:${local.filesystem.endpoint}"]
    filesystem-on-login   = ["shared-filesystem-client:juju-info", "sackd:juju-info"]
    filesystem-on-compute = ["shared-filesystem-client:juju-info", "slurmd:juju-info"]
    gpus-on-compute       = ["slurm-gpu:compute", "slurmd:juju-info"]
    gpus-on-controller    = ["slurm-gpu-controller:controller", "slurmctld:juju-info"]
    gres                  = ["slurm-gpu:node-gres", "slurm-gpu-controller:gres"]
    trainer               = ["trainer:juju-info", "sackd:juju-info"]
  }
}

resource "juju_integration" "all" {
  for_each   = local.integrations
  model_uuid = var.model_uuid

  dynamic "application" {
    for_each = each.value
    content {
      name     = split(":", application.value)[0]
      endpoint = split(":", application.value)[1]
    }
  }

  depends_on = [
    juju_application.mysql,
    module.slurmctld,
    module.slurmdbd,
    module.slurmrestd,
    module.slurmd,
    module.sackd,
    module.juicefs_server_proxy,
    module.shared_filesystem_client,
    module.slurm_gpu,
    module.slurm_gpu_controller,
    module.trainer,
  ]
}
