#!/bin/sh
# Check every shell script of the repository: whatever begins by naming a shell, templates aside.
set -eu
cd "$(dirname "$0")/.."
git ls-files -co --exclude-standard |
    while read -r file; do
        case $file in *.j2) continue ;; esac
        [ -f "$file" ] && head -n 1 "$file" | grep -qE '^#!.*[ /](ba|da)?sh( |$)' && printf '%s\0' "$file"
    done |
    xargs -0 shellcheck
