# shellcheck shell=bash
# The set-up of ./test: axe-core, the npm package that checks the accessibility of the web page. One file of it is kept
# in .venv. It is fetched without npm, and its digest is checked.

AXE_VERSION=4.14.0
AXE_SHA256=20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878
AXE=$VENV/axe-$AXE_VERSION.min.js

FETCH_AXE='
import hashlib, io, os, sys, tarfile, urllib.request

path, version, digest = sys.argv[1:]
registry = os.environ.get("npm_config_registry", "https://registry.npmjs.org").rstrip("/")
url = f"{registry}/axe-core/-/axe-core-{version}.tgz"
with urllib.request.urlopen(url, timeout=60) as answer:
    archive = tarfile.open(fileobj=io.BytesIO(answer.read()))
text = archive.extractfile("package/axe.min.js").read()
if hashlib.sha256(text).hexdigest() != digest:
    sys.exit(f"{url} has another content than expected")
with open(f"{path}.new", "wb") as file:
    file.write(text)
os.replace(f"{path}.new", path)
'

has_axe() { [ -s "$AXE" ]; }

install_axe() {
    has_axe && return # another call fetched it while this one waited
    say "fetching axe-core $AXE_VERSION"
    quietly "$VENV/bin/python" -I -c "$FETCH_AXE" "$AXE" "$AXE_VERSION" "$AXE_SHA256" ||
        fail "axe-core could not be fetched" "fix the error above, or set npm_config_registry to another registry of npm"
}
