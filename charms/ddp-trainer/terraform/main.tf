resource "juju_application" "ddp_trainer" {
  name       = var.app_name
  model_uuid = var.model_uuid

  charm {
    name     = "ddp-trainer"
    base     = var.base
    channel  = var.channel
    revision = var.revision
  }

  config    = var.config
  resources = var.resources
}
