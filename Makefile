# Every target does its own set-up: git, make and python3 are all that a fresh Debian 12 or Ubuntu 24.04 needs.
.DEFAULT_GOAL := help
LANES := /usr/bin/python3 scripts/lanes.py

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z0-9.-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: demo
demo:  ## the bundle on this machine: deploy, train on two nodes over JuiceFS, show the result; BASE=26.04
	@./sandboxctl demo $(if $(BASE),--base $(BASE))

.PHONY: down
down:  ## remove the sandbox: hosts, mounts, processes, network
	@./sandboxctl destroy --no-prompt

.PHONY: test
test:  ## every lane that needs no Juju: lint, docs, unit, payload, bundle, sandbox, storage, pack, functional
	@$(LANES)

.PHONY: test-long
test-long:  ## the long sets: every functional test, the emulated kernel, random orders of events, the pages' commands
	@$(LANES) long

.PHONY: lint docs unit functional kernel orders bench pack integration upstream mutants
lint:  ## ruff, pyright, codespell, shellcheck
docs:  ## the documentation as a site in build/site, links checked
unit:  ## tests of the parts: charms, library, payload, bundle, sandbox
functional:  ## the bundle in the sandbox, without the tests marked long (root)
kernel:  ## NFS and CephFS with a real kernel, in an emulated machine (root)
orders:  ## random orders of events, 10,000 for each charm; SLURM_DDP_ORDERS=N for another number
bench:  ## measurements, each against a peer or a limit
pack:  ## the .charm files and the bundle into dist/, and tests that open them
integration:  ## the bundle on juju's current controller, 3.6 or 4
upstream:  ## upstream's own charms beside ours, from checkouts that SLURM_DDP_UPSTREAM names
mutants:  ## mutmut on the modules where a wrong line costs nodes, by hand
lint docs unit functional kernel orders bench pack integration upstream mutants:
	@$(LANES) $@

.PHONY: pictures
pictures:  ## the pictures of the documentation into docs/images, from a demo in the sandbox (root, Chromium)
	@scripts/venv.sh pictures charms/ddp-trainer/requirements.txt
	@build/venvs/pictures/bin/python scripts/pictures.py

.PHONY: deploy
deploy:  ## pack, then juju deploy ./bundle.yaml on the current controller; OVERLAYS="gpu nfs" adds overlays
	@scripts/deploy.sh

.PHONY: format
format:  ## fix what ruff can fix
	@$(LANES) format

.PHONY: lock
lock:  ## compile every requirements.in into its hashed requirements.txt
	@$(LANES) lock

.PHONY: clean
clean:  ## remove what was built here; the sandbox goes first
	@if [ -x build/venvs/sandbox/bin/python ]; then ./sandboxctl destroy --no-prompt; fi
	rm -rf build dist .tox parts stage prime .pytest_cache .ruff_cache .hypothesis
