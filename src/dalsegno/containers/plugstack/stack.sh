# On a host: FILE gets LINE at its end, and the LINEs after it are put out of use; "" adds none. Whole or not at all.
# What it was is kept beside it under a name that no `include DIR/*` takes in. Again: changes nothing.
set -eu
file=$1 add=$2
shift 2
umask 022
mkdir -p "$(dirname "$file")"
if [ -e "$file" ]; then file=$(readlink -f "$file"); fi
[ -w "$(dirname "$file")" ] || { echo "$(dirname "$file"): Permission denied" >&2 && exit 1; }
new=$(mktemp "$(dirname "$file")/.$(basename "$file").dalsegno.XXXXXX") # never a file or a link that is there
trap 'rm -f "$new"' EXIT
if [ -e "$file" ]; then cp -p "$file" "$new"; else chmod 644 "$new"; fi
if [ -e "$file" ]; then
    while IFS= read -r line || [ -n "$line" ]; do
        bare=$(printf '%s\n' "$line" | sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//')
        for each in "$@"; do if [ "$bare" = "$each" ]; then line="# out of use, by dalsegno: $line"; fi; done
        printf '%s\n' "$line"
    done <"$file" >"$new"
fi
if [ -n "$add" ] && ! grep -qxF -- "$add" "$new"; then printf '# by dalsegno containers check --repair\n%s\n' "$add" >>"$new"; fi
if [ -e "$file" ] && cmp -s "$new" "$file"; then echo ds:done && exit 0; fi
before=$(dirname "$file")/.$(basename "$file").before-dalsegno
if [ -e "$file" ] && [ ! -e "$before" ] && [ ! -L "$before" ]; then cp -p "$file" "$before"; fi
sync "$new" 2>/dev/null || sync
mv -f "$new" "$file"
echo ds:done
