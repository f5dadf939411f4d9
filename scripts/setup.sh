# shellcheck shell=bash
# The set-up of ./dalsegno and ./test. The caller sets ROOT to the folder of the repository.
# It works with bash 3.2 (macOS), and uses only builtins unless something is missing: a later call takes a few ms.
#
# Variables for unusual machines and for tests:
#   DALSEGNO_PYTHON      the interpreter for .venv
#   DALSEGNO_PROBE_PATH  where to look for Slurm and the other programs (default: PATH and the sbin folders)
#   DALSEGNO_SYSROOT     the root folder in which to look for an interrupted set-up (default: /)

VENV=${ROOT:?}/.venv
TRIED=$VENV/dalsegno-containers.tried # exists if the packages for containers could not be installed

# Programs of the local target, as program:package. Debian and Ubuntu use the same names.
LOCAL_PROGRAMS="slurmctld:slurmctld slurmd:slurmd slurmdbd:slurmdbd slurmrestd:slurmrestd sinfo:slurm-client
    munged:munge mariadbd:mariadb-server mariadb-install-db:mariadb-server ip:iproute2 nsenter:util-linux"

# Additional programs for container jobs: to compile the Slurm plugin, and to make and unpack images. A path is a file.
CONTAINER_PROGRAMS="gcc:gcc /usr/include/stdio.h:libc6-dev /usr/include/slurm/spank.h:libslurm-dev
    sqfstar:squashfs-tools squashfuse_ll:squashfuse zstd:zstd"

# Additional programs for `monitoring: {prometheus: true}` and `dalsegno monitor up`.
MONITOR_PROGRAMS="prometheus:prometheus prometheus-alertmanager:prometheus-alertmanager
    prometheus-node-exporter:prometheus-node-exporter"

# Additional programs for `directory: {kind: ldap}`.
DIRECTORY_PROGRAMS="slapd:slapd openssl:openssl"

# Only `demo --scene docker` needs these.
DOCKER_PROGRAMS="dockerd:docker.io"

# Additional programs for ./test: it compiles and runs an MPI program, makes an image of one program, builds
# Dockerfiles, and runs a registry with images of other tools, hosts that are reached over ssh, and an LDAP server.
# Chromium opens the web page.
# Headers have no program to look for, so their packages are listed with the compiler. So are modules of PAM and NSS.
SUITE_PROGRAMS="gcc:gcc mpicc:openmpi-bin mpicc:libopenmpi-dev mpicc:libc6-dev busybox:busybox-static
    docker-registry:docker-registry skopeo:skopeo umoci:umoci buildah:buildah sshd:openssh-server sudo:sudo
    chromium:chromium ldapsearch:ldap-utils nslcd:nslcd nslcd:libnss-ldapd nslcd:libpam-slurm-adopt
    $MONITOR_PROGRAMS $DIRECTORY_PROGRAMS"

say() { printf 'dalsegno: %s\n' "$*" >&2; }

fail() { # fail WHAT [HINT-LINE...]
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf 'hint: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  %s\n' "${@:2}" >&2
    exit 1
}

# set_up core|dev [local [containers|offer] [docker] [monitor] [directory]]: prepare .venv and, with `local`, the system packages.
# With `containers`, the packages for containers are required; with `offer`, they are installed if possible.
set_up() {
    MISSING='' OFFERED=''
    venv_ready "$1" || need_python
    [ "${2-}" != local ] || need_local_packages "$1" "${@:3}"
    [ -z "$MISSING" ] || install_packages
    venv_ready "$1" || in_turn complete_venv "$1" || exit
    [ -z "$OFFERED" ] || install_offered
}

setup_command() { # dalsegno setup [--dev] [--torch]
    local extras=core torch=
    while [ $# -gt 0 ]; do
        case $1 in
            --dev) extras=dev ;;
            --torch) torch=yes ;;
            -h | --help)
                echo "Usage: ./dalsegno setup [--dev] [--torch]"
                echo "Installs the system packages for a local cluster and creates .venv. You can run it again at any time."
                echo "  --dev    also install what ./test needs"
                echo "  --torch  also install PyTorch: the CPU build if there is no NVIDIA GPU"
                exit 0
                ;;
            *)
                printf 'error: setup has no option %s\nhint: ./dalsegno setup --help\n' "$1" >&2
                exit 2
                ;;
        esac
        shift
    done
    set_up "$extras" local containers
    rm -f "$TRIED"
    if [ -n "$torch" ]; then
        . "$ROOT/scripts/torch.sh"
        in_turn install_torch || exit
    fi
    say "ready"
}

# Which commands need Slurm on this machine

makes_local_cluster() { # takes the arguments of the command line
    case " $* " in *" -h "* | *" --help "*) return 1 ;; esac
    case ${1-} in
        demo) return 0 ;;
        monitor) [ "${2-}" = up ] ;;
        up) ! names_remote_target "${@:2}" cluster.yaml ;;
        *) return 1 ;;
    esac
}

trains_with_torch() { # takes the arguments of the command line; the demo trains, unless another scene is selected
    [ "${1-}" = demo ] || return 1
    case " $* " in *" -h "* | *" --help "* | *researchers*) return 1 ;; esac
    ! asks_for_docker "$@"
}

names_remote_target() { # true if the first argument that is a file is a cluster file for another target
    names_target 'ssh|parallelcluster|hyperpod|oci' "$@"
}

names_target() { # names_target A|B FILE...: true if the first of these that is a file names one of the targets
    local file line named='^target:[[:space:]"'\'']*('$1')([^a-z]|$)'
    for file in "${@:2}"; do
        [ -f "$file" ] || continue
        while IFS= read -r line || [ -n "$line" ]; do
            [[ $line =~ $named ]] && return 0
        done <"$file"
        return 1
    done
    return 1
}

asks_for_ssh() { # takes the arguments of the command line; true if the cluster file has hosts over SSH
    case " $* " in *" -h "* | *" --help "*) return 1 ;; esac
    case ${1-} in plan | up) names_target ssh "${@:2}" cluster.yaml ;; *) return 1 ;; esac
}

# System packages

need() { case " $MISSING " in *" $1 "*) ;; *) MISSING="${MISSING:+$MISSING }$1" ;; esac; }

asks_for_docker() { # takes the arguments of the command line; true for the scene with Docker
    [ "${1-}" = demo ] || return 1
    case " $* " in *" --scene docker "* | *" --scene=docker "*) ;; *) return 1 ;; esac
}

containers_in_file() { # takes the arguments of the command line; prints yes, no or nothing, as `containers:` says
    local file line inside='' said='' off='enabled:[[:space:]]*(false|no|off)'
    for file in "${@:2}" cluster.yaml; do
        [ -f "$file" ] || continue
        while IFS= read -r line || [ -n "$line" ]; do
            case $line in
                containers:*) inside=yes said=yes ;;
                [![:space:]#]*) inside= ;;
            esac
            [ -n "$inside" ] && [[ $line =~ $off ]] && said=no
        done <"$file"
        break
    done
    echo "$said"
}

says_in_file() { # says_in_file BLOCK PATTERN FILE...: true if the first of these files has a matching line in the block
    local file line inside='' said=''
    for file in "${@:3}" cluster.yaml; do
        [ -f "$file" ] || continue
        while IFS= read -r line || [ -n "$line" ]; do
            case $line in
                "$1":*) inside=yes ;;
                [![:space:]#]*) inside= ;;
            esac
            [ -n "$inside" ] && [[ $line =~ ^[^#]*$2 ]] && said=yes
        done <"$file"
        break
    done
    [ -n "$said" ]
}

asks_for_prometheus() { # takes the arguments of the command line; true for `monitor up`, and as `monitoring:` says
    [ "${1-}" != monitor ] || return 0
    [ "${1-}" = up ] && says_in_file monitoring 'prometheus:[[:space:]]*(true|yes|on)' "${@:2}"
}

asks_for_ldap() { # takes the arguments of the command line; true if `directory:` of the cluster file says ldap
    [ "${1-}" = up ] && says_in_file directory 'kind:[[:space:]"'\'']*ldap' "${@:2}"
}

need_local_packages() { # need_local_packages core|dev [containers|offer] [docker] [monitor] [directory]
    [ "${OSTYPE#linux}" != "$OSTYPE" ] || return 0
    local pair more offered='' programs=$LOCAL_PROGRAMS PATH=${DALSEGNO_PROBE_PATH-$PATH:/usr/local/sbin:/usr/sbin:/sbin}
    [ "$1" = core ] || programs="$programs $SUITE_PROGRAMS"
    for more in "${@:2}"; do
        case $more in
            containers) programs="$programs $CONTAINER_PROGRAMS" ;;
            offer) offered=$CONTAINER_PROGRAMS ;;
            docker) programs="$programs $DOCKER_PROGRAMS" ;;
            monitor) programs="$programs $MONITOR_PROGRAMS" ;;
            directory) programs="$programs $DIRECTORY_PROGRAMS" ;;
        esac
    done
    for pair in $programs; do has_program "${pair%%:*}" || need "${pair#*:}"; done
    for pair in $offered; do has_program "${pair%%:*}" || OFFERED="${OFFERED:+$OFFERED }${pair#*:}"; done
    # An interrupted set-up leaves this file: its packages may be unpacked but not configured.
    local package pending=${DALSEGNO_SYSROOT-}/var/lib/dalsegno-setup/packages
    [ ! -r "$pending" ] || for package in $(<"$pending"); do need "$package"; done
}

has_program() { # has_program NAME|/FILE
    case $1 in
        /*) [ -e "${DALSEGNO_SYSROOT-}$1" ] ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# Without root, apt or a network there are no containers, and `plan` says what is missing. This is tried once;
# `./dalsegno setup` tries again.
install_offered() {
    local as_root=() rc=0
    [ ! -e "$TRIED" ] && command -v apt-get >/dev/null || return 0
    if [ "$EUID" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 0
        as_root=(sudo -n)
    fi
    say "installing system packages for containers: $OFFERED"
    # shellcheck disable=SC2086 # a list of package names
    ${as_root[@]+"${as_root[@]}"} "$ROOT/scripts/install-packages" --optional $OFFERED || rc=$?
    [ $rc -lt 128 ] || exit $rc
    [ $rc -eq 0 ] || { say "this cluster has no containers; run \`./dalsegno setup\` to try again" && : >"$TRIED"; }
}

install_packages() {
    command -v apt-get >/dev/null || fail "system packages are missing: $MISSING" \
        "only packages of Debian and Ubuntu are supported; install the same software in another way, then try again"
    local as_root=()
    if [ "$EUID" -ne 0 ]; then
        sudo -n true 2>/dev/null || say_what_to_install
        as_root=(sudo -n)
    fi
    say "installing system packages: $MISSING"
    # shellcheck disable=SC2086 # a list of package names
    ${as_root[@]+"${as_root[@]}"} "$ROOT/scripts/install-packages" $MISSING || exit
}

say_what_to_install() {
    fail "system packages are missing, and installing them needs root: $MISSING" \
        "as root, run either of these, then try again:" \
        "apt-get update && apt-get install -y --no-install-recommends $MISSING" \
        "$(printf '%q' "$ROOT/dalsegno") setup    (the same, and keeps the packages' own services from starting)"
}

# The virtual environment

# The stamp is written last. It holds the folder, the interpreter and the pyproject.toml for which .venv is complete.
venv_ready() { # venv_ready core|dev
    local stamp=$VENV/dalsegno-$1.stamp root='' python='' have='' want=''
    [ -r "$stamp" ] || return 1
    { IFS= read -r root && IFS= read -r python && IFS= read -r -d '' have; } <"$stamp"
    IFS= read -r -d '' want <"$ROOT/pyproject.toml"
    [ "$root" = "$ROOT" ] && [ "$VENV/bin/python" -ef "$python" ] && [ "$have" = "$want" ]
}

write_stamp() { # write_stamp core|dev
    local stamp=$VENV/dalsegno-$1.stamp python
    python=$("$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))') || return 1
    { printf '%s\n%s\n' "$ROOT" "$python" && cat "$ROOT/pyproject.toml"; } >"$stamp.new" && mv -f "$stamp.new" "$stamp"
}

venv_usable() {
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

in_turn() ( # runs a step on .venv while no other call does; even with sudo, .venv belongs to the owner of the clone
    exec 9<"$ROOT/scripts" && lock 9
    umask 022
    "$@"
    [ "$EUID" -ne 0 ] || chown -R -h "$(owner_of "$ROOT")" "$VENV"
)

complete_venv() { # complete_venv core|dev
    local package=.
    [ "$1" = core ] || package=".[$1]"
    venv_ready "$1" && return # another call finished it while this one waited
    [ -w "$VENV" ] || { [ ! -e "$VENV" ] && [ -w "$ROOT" ]; } ||
        fail "$VENV is incomplete, and you may not write to it" "run \`./dalsegno setup\` as the owner of the folder"
    if ! venv_usable; then
        find_python || no_python
        say "creating .venv with $PYTHON"
        quietly "$PYTHON" -m venv --clear "$VENV" || fail "could not create $VENV"
    fi
    say "installing Python packages into .venv"
    rm -f "$VENV"/dalsegno-*.stamp # pip may be interrupted between removing the old version and installing the new one
    cd "$ROOT" || exit 1
    quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -e "$package" ||
        fail "pip could not install what Dal Segno needs" "fix the error of pip above, then try again"
    { write_stamp core && write_stamp "$1"; } || fail "could not write to $VENV"
}

need_extra() { # need_extra EXTRA MODULE: install an optional dependency, unless .venv has its module
    compgen -G "$VENV/lib/python3*/site-packages/$2" >/dev/null || in_turn install_extra "$1" || exit
}

install_extra() {
    say "installing Python packages for $1"
    quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "dalsegno[$1]" ||
        fail "pip could not install what $1 needs" "fix the error of pip above, then try again"
}

owner_of() { "$VENV/bin/python" -c 'import os, sys; s = os.stat(sys.argv[1]); print(f"{s.st_uid}:{s.st_gid}")' "$1"; }

lock() { # lock FD: waits for the lock, which ends with the process that holds it
    if command -v flock >/dev/null; then
        flock --nonblock "$1" || { say "waiting for another set-up to finish"; flock "$1"; }
    else
        find_python || no_python
        "$PYTHON" -c 'import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)' "$1"
    fi
}

quietly() { # runs a command, and shows the end of its output only if it fails
    # The output goes to an unlinked file: background processes of the command delay nothing, and no file is left.
    local file said rc=0
    file=$(mktemp) || { "$@" </dev/null; return; }
    exec {said}<>"$file"
    rm -f -- "$file"
    "$@" >&"$said" 2>&1 </dev/null {said}>&- || rc=$?
    [ $rc -eq 0 ] || tail -n 20 "/dev/fd/$said" >&2
    exec {said}>&-
    return $rc
}

# Python

need_python() {
    venv_usable && return
    if find_python; then
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || need "$(venv_package)"
    elif [ -x /usr/bin/python3 ] || ! command -v apt-get >/dev/null; then
        no_python
    else
        need python3
        need python3-venv
    fi
}

venv_package() {
    case $PYTHON in
        /usr/bin/python3) echo python3-venv ;;
        *) "$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])' ;;
    esac
}

# The system's Python comes first: other users cannot run one in a home folder (pyenv, conda).
find_python() {
    local name folder
    PYTHON=${DALSEGNO_PYTHON-}
    [ -z "$PYTHON" ] || { new_enough "$PYTHON"; return; }
    for folder in /usr/bin/ /usr/local/bin/ ''; do
        for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
            PYTHON=$(command -v "$folder$name") && new_enough "$PYTHON" && return
        done
    done
    return 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

no_python() {
    fail "Dal Segno needs Python 3.10 or newer, and ${DALSEGNO_PYTHON:-nothing found here} is not" \
        "install one (Debian 12, Ubuntu 22.04 and later: apt-get install python3 python3-venv), or name it: DALSEGNO_PYTHON=/path/to/python3 ./dalsegno …"
}
