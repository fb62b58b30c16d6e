#!/bin/bash
# Slurm Epilog, as root on each node: ends the receive path that the Prolog started.
docker rm --force tcpxo-receiver > /dev/null 2>&1
exit 0
