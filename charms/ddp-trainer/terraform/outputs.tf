output "application" {
  description = "The deployed application."
  value       = juju_application.ddp_trainer
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
    juju_info = "juju-info"
  }
}
