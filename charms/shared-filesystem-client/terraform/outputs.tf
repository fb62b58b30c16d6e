output "application" {
  description = "The deployed application."
  value       = juju_application.shared_filesystem_client
}

output "provides" {
  description = "Endpoints that the charm provides."
  value = {
    cos_agent = "cos-agent"
  }
}

output "requires" {
  description = "Endpoints that the charm requires."
  value = {
    filesystem = "filesystem"
    juju_info  = "juju-info"
    mount      = "mount"
  }
}
