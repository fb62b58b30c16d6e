# Plan and apply against a mock of the Juju provider: terraform test, or tofu test.

mock_provider "juju" {}

variables {
  model_uuid = "5f1f4f6e-3b1c-4c55-8a55-6a1c5a6a2f10"
}

run "the_bundle_is_planned" {
  command = plan

  assert {
    condition     = length(juju_integration.all) == 12
    error_message = "The bundle has twelve relations."
  }

  assert {
    condition     = length(module.juicefs_server_proxy) == 1
    error_message = "The embedded JuiceFS volume is part of the default deployment."
  }

  assert {
    condition     = var.slurm_channel == "latest/edge" && var.base == "ubuntu@24.04"
    error_message = "The Slurm charms are deployed from latest/edge on Ubuntu 24.04, as bundle.yaml does."
  }
}

run "options_and_constraints_reach_the_application" {
  command = plan

  variables {
    mysql = { config = { profile = "production" }, constraints = "arch=amd64 mem=8G" }
  }

  assert {
    condition     = juju_application.mysql.config["profile"] == "production"
    error_message = "The database's options are those of the variable."
  }

  assert {
    condition     = juju_application.mysql.constraints == "arch=amd64 mem=8G"
    error_message = "The database's constraints are those of the variable."
  }
}

run "the_bundle_is_applied" {
  assert {
    condition     = length(output.components) == 11
    error_message = "Every application of the bundle is an output."
  }
}

run "another_filesystem_takes_the_place_of_juicefs" {
  command = plan

  variables {
    juicefs_server_proxy = null
    filesystem           = { name = "nfs-server-proxy" }
  }

  assert {
    condition     = length(module.juicefs_server_proxy) == 0
    error_message = "juicefs-server-proxy is left out."
  }

  assert {
    condition     = output.provides.filesystem.application == "nfs-server-proxy"
    error_message = "The filesystem is the one that was named."
  }
}

run "two_filesystems_are_refused" {
  command = plan

  variables {
    filesystem = { name = "nfs-server-proxy" }
  }

  expect_failures = [var.filesystem]
}
