# The bundle as one Terraform module: the applications, options and relations of bundle.yaml, which a test compares.

resource "juju_application" "mysql" {
  count      = var.mysql == null ? 0 : 1
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

locals {
  # Plain applications: the modules of the Slurm charms admit no provider above 1.x, which Juju 4 needs.
  slurm = {
    slurmctld = merge(var.slurmctld, {
      units = 1
      config = merge({
        cluster-name      = "ddp"
        default-partition = "slurmd"
        # A lost node is noticed after one minute, and a job that it ends is queued for half a minute: docs/howto/resume.md
        slurm-conf-parameters = "SlurmdTimeout=60\nAuthInfo=cred_expire=30\n"
      }, var.slurmctld.config)
    })
    slurmdbd   = merge(var.slurmdbd, { units = 1 })
    slurmrestd = merge(var.slurmrestd, { units = 1 })
    slurmd = merge(var.slurmd, {
      config = merge({ default-node-state = "idle" }, var.slurmd.config)
    })
    sackd = merge(var.sackd, { units = 1 })
  }
}

resource "juju_application" "slurm" {
  for_each   = local.slurm
  name       = each.key
  model_uuid = var.model_uuid

  charm {
    name    = each.key
    base    = var.base
    channel = var.slurm_channel
  }

  config      = each.value.config
  constraints = each.value.constraints
  machines    = each.value.machines
  units       = each.value.units
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
  database   = var.database != null ? var.database : { name = "mysql", endpoint = "database" }

  # The name of each integration, and its two ends as "application:endpoint"
  integrations = {
    slurmdbd-mysql        = ["slurmdbd:database", "${local.database.name}:${local.database.endpoint}"]
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
    juju_application.slurm,
    module.juicefs_server_proxy,
    module.shared_filesystem_client,
    module.slurm_gpu,
    module.slurm_gpu_controller,
    module.trainer,
  ]
}
