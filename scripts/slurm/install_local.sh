#!/usr/bin/env bash
# Installs Slurm and munge from Debian's packages, for a cluster on this machine alone (tests/cluster). Starts nothing.
# Exit status: 0 all there; 1 the packages could not be installed; 2 this machine cannot have them (the reason is printed).
set -euo pipefail

need=(slurmctld slurmd sbatch srun scontrol munged)
missing() { # the commands that are not there
    local name
    for name in "${need[@]}"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$name" >/dev/null || echo "$name"
    done
}

if [ -z "$(missing)" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "Slurm is missing ($(missing | xargs)), and this is no Debian or Ubuntu to install it on" >&2
    exit 2
fi
if [ "$(id -u)" != 0 ]; then
    echo "Slurm is missing ($(missing | xargs)), and only root can install it: sudo scripts/slurm/install_local.sh" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge iproute2 util-linux; }
# Lists may be missing or old: they are fetched only where the packages are not found with those there are.
install || { apt-get update -q && install; } || {
    echo "Slurm's packages could not be installed; the lines above say why" >&2
    exit 1
}
if [ -n "$(missing)" ]; then
    echo "Slurm's packages are installed, but these commands are not there: $(missing | xargs)" >&2
    exit 1
fi
