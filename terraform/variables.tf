variable "model_uuid" {
  description = "UUID of the Juju model, on a machine cloud."
  type        = string
  nullable    = false
}

variable "channel" {
  description = "Charmhub channel of slurm-ddp's charms."
  type        = string
  default     = "latest/edge"
  nullable    = false
}

variable "slurm_channel" {
  description = "Charmhub channel of the Slurm charms."
  type        = string
  default     = "latest/edge"
  nullable    = false
}

variable "base" {
  description = "Base of every application but mysql."
  type        = string
  default     = "ubuntu@24.04"
  nullable    = false
}

variable "mysql" {
  description = "The accounting database; null leaves it out, as on Juju 4, and then `database` names what takes its place."
  type = object({
    config      = optional(map(string), { profile = "testing" })
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default = {}
}

variable "database" {
  description = "Another provider of mysql_client in the model, as { name = \"mysql-proxy\", endpoint = \"database\" }."
  type = object({
    name     = string
    endpoint = optional(string, "database")
  })
  default = null

  validation {
    condition     = (var.database == null) != (var.mysql == null)
    error_message = "Set exactly one of mysql and database: set the other to null."
  }
}

variable "slurmctld" {
  description = "The controller. Options that are given here are added to the defaults."
  type = object({
    config      = optional(map(string), {})
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default  = {}
  nullable = false
}

variable "slurmdbd" {
  description = "The accounting daemon."
  type = object({
    config      = optional(map(string), {})
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default  = {}
  nullable = false
}

variable "slurmrestd" {
  description = "The REST API."
  type = object({
    config      = optional(map(string), {})
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default  = {}
  nullable = false
}

variable "slurmd" {
  description = "The compute nodes; the application's name is the partition's. `constraints` selects machines with GPUs."
  type = object({
    units       = optional(number, 2)
    config      = optional(map(string), {})
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default  = {}
  nullable = false
}

variable "sackd" {
  description = "The login node."
  type = object({
    config      = optional(map(string), {})
    constraints = optional(string, "arch=amd64")
    machines    = optional(set(string))
  })
  default  = {}
  nullable = false
}

variable "juicefs_server_proxy" {
  description = "The shared JuiceFS volume; null leaves it out, and then `filesystem` names what is mounted instead."
  type = object({
    config             = optional(map(string), {})
    constraints        = optional(string, "arch=amd64")
    machines           = optional(set(string))
    resources          = optional(map(string), {})
    revision           = optional(number)
    storage_directives = optional(map(string), {})
  })
  default = {}
}

variable "filesystem" {
  description = "Another provider of filesystem_info in the model, as { name = \"nfs-server-proxy\", endpoint = \"filesystem\" }."
  type = object({
    name     = string
    endpoint = optional(string, "filesystem")
  })
  default = null

  validation {
    condition     = (var.filesystem == null) != (var.juicefs_server_proxy == null)
    error_message = "Set exactly one of juicefs_server_proxy and filesystem: set the other to null."
  }
}

variable "shared_filesystem_client" {
  description = "The mount on login and compute nodes."
  type = object({
    config    = optional(map(string), {})
    resources = optional(map(string), {})
    revision  = optional(number)
  })
  default  = {}
  nullable = false
}

variable "slurm_gpu" {
  description = "GPUs on compute nodes; `config` holds the options of slurm-gpu's compute role."
  type = object({
    config   = optional(map(string), {})
    revision = optional(number)
  })
  default  = {}
  nullable = false
}

variable "trainer" {
  description = "The trainer."
  type = object({
    config    = optional(map(string), {})
    resources = optional(map(string), {})
    revision  = optional(number)
  })
  default  = {}
  nullable = false
}
