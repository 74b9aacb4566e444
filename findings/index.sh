#!/usr/bin/env bash
# Writes the index of this folder from the heads of its scripts: bash findings/index.sh > findings/README.md
set -euo pipefail
cd "$(dirname "$0")"
cat <<'TEXT'
# Findings

Real libraries and formats of this field that behave as a good engineer would not guess. Each script makes a temporary folder,
installs pinned packages, runs them without covmerge on valid input, and fails if the behaviour changes: `bash findings/NAME.sh`.
They run outside the tests. This page is written by `bash findings/index.sh > findings/README.md`.

TEXT
for script in *.sh; do
  [ "$script" = index.sh ] && continue
  echo "- [${script%.sh}]($script): $(sed -n '2s/^# //p' "$script")"
done
