resource "juju_application" "shared_filesystem_client" {
  name       = var.app_name
  model_uuid = var.model_uuid

  charm {
    name     = "shared-filesystem-client"
    base     = var.base
    channel  = var.channel
    revision = var.revision
  }

  config    = var.config
  resources = var.resources
}
