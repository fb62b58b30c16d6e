variable "app_name" {
  description = "Name of the Juju application."
  type        = string
  default     = "slurm-gpu"
  nullable    = false
}

variable "base" {
  description = "Base of the application's machines."
  type        = string
  default     = "ubuntu@24.04"
  nullable    = false
}

variable "channel" {
  description = "Charmhub channel of the charm."
  type        = string
  default     = "latest/edge"
  nullable    = false
}

variable "config" {
  description = "Charm options; docs/reference/charms lists them."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "model_uuid" {
  description = "UUID of the Juju model."
  type        = string
  nullable    = false
}

variable "revision" {
  description = "Revision of the charm; null takes the newest of the channel."
  type        = number
  default     = null
}
