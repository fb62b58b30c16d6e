variable "app_name" {
  description = "Name of the Juju application."
  type        = string
  default     = "juicefs-server-proxy"
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

variable "constraints" {
  description = "Juju constraints of the application's machines; arch=amd64 is what Juju 4 adds where it is missing."
  type        = string
  default     = "arch=amd64"
}

variable "machines" {
  description = "Identifiers of existing machines to place units on; null lets Juju choose."
  type        = set(string)
  default     = null
}

variable "model_uuid" {
  description = "UUID of the Juju model."
  type        = string
  nullable    = false
}

variable "resources" {
  description = "Resources of the charm (juicefs): a Charmhub revision for each name."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "revision" {
  description = "Revision of the charm; null takes the newest of the channel."
  type        = number
  default     = null
}

variable "storage_directives" {
  description = "Storage of each unit (volume), like { volume = \"200G\" }."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "units" {
  description = "Number of units."
  type        = number
  default     = 1
  nullable    = false
}
