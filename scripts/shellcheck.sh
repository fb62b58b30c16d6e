#!/bin/sh
# Check every shell script of the repository: whatever begins by naming a shell, templates aside.
set -eu
cd "$(dirname "$0")/.."
# awk warns of links to folders
git ls-files -co --exclude-standard -- ':!*.j2' |
    xargs -d '\n' awk 'FNR == 1 && /^#!.*[ \/](ba|da)?sh( |$)/ { print FILENAME } { nextfile }' 2>/dev/null |
    xargs -d '\n' shellcheck
