# On a host: the files that come as base64 of a tar archive with this SHA-256 are in FOLDER, each whole or not at all;
# then folders for what the plugin keeps. Again: puts back what is missing or damaged, and else changes nothing.
set -eu
umask 022
sum=$1 target=$2 && shift 2
mkdir -p "$target" "$@"
for each in "$target" "$@"; do # root loads what lies there, and keeps users' containers there
    open=$(open_part "$each")
    if [ -n "$open" ]; then
        echo "$open is not $(id -un)'s alone" >&2
        exit 1
    fi
done
new=$(mktemp -d "$target/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
base64 -d >"$new/archive"
case $(sha256sum <"$new/archive") in
"$sum "*) ;;
*) echo "the plugin did not arrive whole" >&2 && exit 1 ;;
esac
mkdir "$new/files"
tar -xof "$new/archive" -C "$new/files" # -o: ours, whoever packed them
chmod 755 "$new/files"/*
# A plugin that does not load, and is required, would keep every job from starting.
if command -v ldd >/dev/null; then
    for each in "$new/files"/*; do
        if ! ldd "$each" >"$new/said" 2>&1 || grep -q 'not found' "$new/said"; then
            echo "it does not run here: $(grep -m 1 'not' "$new/said")" >&2
            exit 1
        fi
    done
fi
sync "$new/files"/* 2>/dev/null || sync
for each in "$new/files"/*; do
    there=$target/${each##*/}
    if [ ! -O "$there" ] || ! cmp -s "$each" "$there"; then
        mv -f "$each" "$there"
    fi
done
find "$target" -maxdepth 1 -name '.new.*' -mmin +10 -exec rm -rf {} + 2>/dev/null || true # of one that was killed
echo ds:done
