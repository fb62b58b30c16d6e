resource "juju_application" "slurm_gpu" {
  name       = var.app_name
  model_uuid = var.model_uuid

  charm {
    name     = "slurm-gpu"
    base     = var.base
    channel  = var.channel
    revision = var.revision
  }

  config = var.config
}
