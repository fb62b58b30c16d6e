terraform {
  required_version = ">= 1.9" # a validation that reads two variables
  required_providers {
    juju = {
      source  = "juju/juju"
      version = "~> 1.0"
    }
  }
}
