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
    condition = alltrue([
      for application in values(juju_application.slurm) :
      application.charm[0].channel == "latest/edge" && application.charm[0].base == "ubuntu@24.04"
    ])
    error_message = "The Slurm charms are deployed from latest/edge on Ubuntu 24.04, as bundle.yaml does."
  }

  assert {
    condition     = juju_application.slurm["slurmd"].units == 2 && juju_application.slurm["sackd"].units == 1
    error_message = "There are two compute nodes and one login node."
  }
}

run "options_and_constraints_reach_the_application" {
  command = plan

  variables {
    mysql  = { config = { profile = "production" }, constraints = "arch=amd64 mem=8G" }
    slurmd = { units = 4, config = { partition-config = "MaxTime=60" } }
  }

  assert {
    condition     = juju_application.mysql[0].config["profile"] == "production"
    error_message = "The database's options are those of the variable."
  }

  assert {
    condition     = juju_application.mysql[0].constraints == "arch=amd64 mem=8G"
    error_message = "The database's constraints are those of the variable."
  }

  assert {
    condition     = juju_application.slurm["slurmd"].units == 4
    error_message = "The number of compute nodes is the variable's."
  }

  assert {
    condition = juju_application.slurm["slurmd"].config == tomap({
      default-node-state = "idle"
      partition-config   = "MaxTime=60"
    })
    error_message = "Options of the variable are added to the bundle's."
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

run "another_database_takes_the_place_of_mysql" {
  command = plan

  variables {
    mysql    = null
    database = { name = "mysql-proxy" }
  }

  assert {
    condition     = length(juju_application.mysql) == 0
    error_message = "mysql, which assumes a Juju below 4, is left out."
  }

  assert {
    condition     = local.integrations.slurmdbd-mysql[1] == "mysql-proxy:database"
    error_message = "slurmdbd is related to the database that was named."
  }
}

run "two_databases_are_refused" {
  command = plan

  variables {
    database = { name = "mysql-proxy" }
  }

  expect_failures = [var.database]
}
