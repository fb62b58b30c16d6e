output "application" {
  description = "The deployed application."
  value       = juju_application.juicefs_server_proxy
}

output "provides" {
  description = "Endpoints that the charm provides."
  value = {
    filesystem = "filesystem"
    cos_agent  = "cos-agent"
  }
}

output "requires" {
  description = "Endpoints that the charm requires."
  value = {
    postgresql = "postgresql"
    mysql      = "mysql"
    s3         = "s3"
  }
}
