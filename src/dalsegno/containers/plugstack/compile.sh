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
printf 'ds:slurm %s\n' "$(scontrol --version)"
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
    if ! gcc -idirafter "$headers" $each >log 2>&1; then
        printf 'ds:command %s\n' "gcc -idirafter $headers $each"
        { sed -n '/error/,$p' log | head -n 10 | grep . || tail -n 10 log; } | sed 's/^/ds:said /'
        exit 1
    fi
done
printf 'ds:parcel %s\n' "$(tar -cf - -C out . | base64 | tr -d '\n')"
