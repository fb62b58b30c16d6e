output "components" {
  description = "The deployed applications, by their names in bundle.yaml."
  value = {
    mysql                    = one(juju_application.mysql[*])
    slurmctld                = juju_application.slurm["slurmctld"]
    slurmdbd                 = juju_application.slurm["slurmdbd"]
    slurmrestd               = juju_application.slurm["slurmrestd"]
    slurmd                   = juju_application.slurm["slurmd"]
    sackd                    = juju_application.slurm["sackd"]
    juicefs-server-proxy     = one(module.juicefs_server_proxy[*].application)
    shared-filesystem-client = module.shared_filesystem_client.application
    slurm-gpu                = module.slurm_gpu.application
    slurm-gpu-controller     = module.slurm_gpu_controller.application
    trainer                  = module.trainer.application
  }
}

output "provides" {
  description = "Endpoints for integrations from outside: the metrics of Slurm and its nodes, the shared volume."
  value = {
    cos_agent        = { application = "slurmctld", endpoint = "cos-agent" }
    metrics_endpoint = { application = "slurmd", endpoint = "metrics-endpoint" }
    filesystem       = { application = local.filesystem.name, endpoint = local.filesystem.endpoint }
  }
}
