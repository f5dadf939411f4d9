# On a host with Slurm and a compiler: sources come as base64 of a tar archive, and what is compiled goes back as one.
# Each argument has a compiler's words for one program.
set -eu
PATH=$PATH:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin
if ! command -v scontrol >/dev/null; then PATH=$PATH:$(sh -lc 'printf "\n%s" "$PATH"' 2>/dev/null </dev/null | tail -n 1); fi
command -v scontrol >/dev/null || { echo "Slurm's commands are not found" >&2 && exit 1; }
command -v gcc >/dev/null || { echo "gcc is not installed" >&2 && exit 1; }
beside=$(dirname "$(dirname "$(readlink -f "$(command -v scontrol)")")")
headers=
for each in "$beside/include" /usr/include /usr/local/include /opt/slurm/include; do
    if [ -r "$each/slurm/spank.h" ]; then headers=$each && break; fi
done
[ -n "$headers" ] || { echo "Slurm's headers are not there (slurm/spank.h)" >&2 && exit 1; }
number=0x$(sed -n 's/.*SLURM_VERSION_NUMBER[[:space:]]*0x//p' "$headers/slurm/slurm_version.h" | head -n 1)
theirs=$((number >> 16)).$((number >> 8 & 255)).$((number & 255))
ours=$(scontrol --version | sed -n 's/^[^0-9]*\([0-9]*\)\.0*\([0-9]\{1,\}\)\.0*\([0-9]\{1,\}\).*/\1.\2.\3/p')
[ "$theirs" = "$ours" ] || { echo "Slurm's headers in $headers are of $theirs, and Slurm itself is $ours" >&2 && exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
base64 -d | tar -xf - -C "$work"
cd "$work"
mkdir out
for each in "$@"; do
    # shellcheck disable=SC2086 # a compiler's words
    gcc -idirafter "$headers" $each >log 2>&1 || { grep -m 1 'error:' log >&2 || tail -n 1 log >&2 && exit 1; }
done
printf 'ds:parcel %s\n' "$(tar -cf - -C out . | base64 | tr -d '\n')"
