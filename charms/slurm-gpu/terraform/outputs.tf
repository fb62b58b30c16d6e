output "application" {
  description = "The deployed application."
  value       = juju_application.slurm_gpu
}

output "provides" {
  description = "Endpoints that the charm provides."
  value = {
    node_gres = "node-gres"
    cos_agent = "cos-agent"
  }
}

output "requires" {
  description = "Endpoints that the charm requires."
  value = {
    compute    = "compute"
    controller = "controller"
    gres       = "gres"
  }
}
