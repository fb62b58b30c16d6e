resource "juju_application" "juicefs_server_proxy" {
  name       = var.app_name
  model_uuid = var.model_uuid

  charm {
    name     = "juicefs-server-proxy"
    base     = var.base
    channel  = var.channel
    revision = var.revision
  }

  config             = var.config
  constraints        = var.constraints
  machines           = var.machines
  resources          = var.resources
  storage_directives = var.storage_directives
  units              = var.machines == null ? var.units : null
}
