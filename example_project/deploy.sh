#!/bin/sh
# What a deployment runs on every machine, on all of them at the same time: one migrates, and the
# others wait for it. Also on empty databases, where there is no table for a lock yet.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python}

"$python" manage.py distlock_run migrate --wait 300 -- "$python" manage.py migrate_all
"$python" manage.py check --database default
