# Runs on each host and reports what Slurm knows about containers there, in lines that begin with `ds:`. Changes nothing.
# The arguments are plugins that other hosts use; the script reports which of them exist on this host.
say() { printf 'ds:%s %s\n' "$1" "$2"; }
soon() { if command -v timeout >/dev/null; then timeout 20 "$@"; else "$@"; fi; }

# Print the first part of a path, with links resolved, that users other than root and this user can write to. A user
# who can write to a folder can replace the files in it.
open_part() (
    case $1 in
    /) ;;
    */*)
        found=$(open_part "$(dirname "$1")")
        if [ -n "$found" ]; then printf '%s\n' "$found" && return; fi
        if [ -L "$1" ]; then
            to=$(readlink "$1")
            case $to in /*) ;; *) to=$(dirname "$1")/$to ;; esac
            open_part "$to"
            return
        fi
        ;;
    esac
    group=0 # on many systems each user has a private group, which is as safe as root's
    if [ "$(id -gn)" = "$(id -un)" ]; then group=$(id -g); fi
    # In a sticky folder such as /tmp, users cannot replace other users' files.
    find "$1" -maxdepth 0 \( ! -user 0 ! -user "$(id -u)" -o ! \( -type d -perm -1000 \) \
        \( -perm -002 -o -perm -020 ! -group 0 ! -group "$group" \) \) 2>&1
)

me=$(id -u)
settings=$(soon scontrol show config 2>/dev/null)
if [ -z "$settings" ] && [ -z "${SLURM_CONF:-}" ]; then
    # A command over ssh reads no profile, but the path of Slurm and its settings may be only in the profile.
    profile=$(sh -lc 'printf "ds:%s\n" "${SLURM_CONF-}" "$PATH"' 2>/dev/null </dev/null | sed -n 's/^ds://p')
    PATH=$PATH:$(printf '%s\n' "$profile" | tail -n 1):/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin
    SLURM_CONF=$(printf '%s\n' "$profile" | head -n 1)
    if [ -n "$SLURM_CONF" ]; then export SLURM_CONF; else unset SLURM_CONF; fi
    settings=$(soon scontrol show config 2>/dev/null)
fi
if command -v scontrol >/dev/null; then say commands yes; fi
version=$(soon scontrol --version 2>&1) # without a slurm.conf it prints the reason instead of a version
say slurm "$(printf '%s\n' "$version" | sed -n 's/^slurm[^0-9]*//p')"
printf '%s\n' "$version" | sed -n 's/^[a-z]*: fatal: /ds:fatal /p'
setting() { printf '%s\n' "$settings" | sed -n "s/^$1 *= *//p" | head -n 1; }

# Find slurm.conf in the order in which Slurm's own commands do.
conf=${SLURM_CONF:-}
if [ -z "$conf" ]; then
    for each in "$(setting SLURM_CONF)" /etc/slurm/slurm.conf /run/slurm/conf/slurm.conf /opt/slurm/etc/slurm.conf; do
        if [ -r "$each" ]; then conf=$each && break; fi
    done
fi
say conf "$conf"
stack=$(sed -n 's/^ *[Pp][Ll][Uu][Gg][Ss][Tt][Aa][Cc][Kk][Cc][Oo][Nn][Ff][Ii][Gg] *= *//p' "$conf" 2>/dev/null | tail -n 1 |
    sed 's/^"\([^"]*\)".*/\1/; s/[[:space:]]*#.*//; s/[[:space:]]*$//')
[ -z "$conf" ] || stack=${stack:-${conf%/*}/plugstack.conf}
say stack "$stack"

# Report each line of plugstack.conf and of the files it includes. The ( ) make the variables of each call local.
read_stack() (
    [ "$2" -lt 6 ] && [ -r "$1" ] || return 0
    cd "$(dirname "$1")" || return 0
    file=$PWD/${1##*/}
    say file "$file"
    sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' "$file" | while IFS= read -r line; do
        say line "$file	$line"
        case $line in
        include[[:space:]]*) for each in ${line#include}; do read_stack "$each" $(($2 + 1)); done ;;
        esac
    done
)
stacked=$(read_stack "$stack" 1)
[ -z "$stacked" ] || printf '%s\n' "$stacked"

# Report the plugins that exist: those in plugstack.conf, those other hosts use, and Pyxis in its usual folders.
folders="$(setting PluginDir | tr ':' ' ') /usr/local/lib/slurm /usr/lib/slurm /usr/lib64/slurm /usr/local/lib64/slurm"
folders="$folders /usr/lib/x86_64-linux-gnu/slurm /usr/lib/aarch64-linux-gnu/slurm /opt/slurm/lib/slurm /opt/slurm/lib64/slurm"
named=$(printf '%s\n' "$stacked" | sed -n 's/^ds:line [^	]*	[a-z]*[[:space:]]*\([^[:space:]]*\.so\).*/\1/p')
for each in $named "$@"; do
    case $each in
    /*) [ -r "$each" ] && say plugin "$each" ;;
    *) for folder in $folders; do [ -r "$folder/$each" ] && say plugin "$folder/$each" && break; done ;;
    esac
done
for folder in $folders; do [ -r "$folder/spank_pyxis.so" ] && say plugin "$folder/spank_pyxis.so"; done

# Report which commands accept --container-image, and srun's errors about plugins.
for each in srun sbatch; do
    help=$(soon $each --help 2>&1)
    case $help in *--container-image*) say knows $each ;; esac
    [ $each = srun ] && printf '%s\n' "$help" | grep -i 'error:.*\(spank\|plug\|dlopen\)' | head -n 3 | sed 's/^/ds:error /'
done

# Report Enroot's version, and its folders that users cannot write to. If root runs this script, test with the rights of
# user 65534 instead, because users run the jobs.
if command -v enroot >/dev/null; then say enroot "$(soon enroot version 2>/dev/null || echo '?')"; fi
who=$me
may_write() { [ -w "$1" ]; }
if [ "$me" = 0 ]; then
    who=65534
    may_write() { setpriv --reuid=65534 --regid=65534 --clear-groups test -w "$1"; }
    command -v setpriv >/dev/null || may_write() { true; }
fi
enroot_conf=${ENROOT_SYSCONF_PATH:-/etc/enroot}
cat "$enroot_conf/enroot.conf" "$enroot_conf"/enroot.conf.d/*.conf 2>/dev/null |
    sed -n "s/[\"']//g; s/^[[:space:]]*ENROOT_\(RUNTIME\|CACHE\|DATA\|TEMP\)_PATH[[:space:]]*=*[[:space:]]*/\1 /p" |
    while read -r name path; do
        common=${path%%\$*} # the path without the part that differs between users
        [ "$common" = "$path" ] || common=${common%/*}
        path=$(printf '%s\n' "$path" | sed "s/\${*E*UID}*/$who/g; s/\$(id -u)/$who/g; s/\${*USER}*/$who/g; s/\$(whoami)/$who/g")
        case $path in *'$'* | '') continue ;; esac
        there=$path
        while [ ! -e "$there" ]; do there=$(dirname "$there"); done
        may_write "$there" || say closed "$name	$common	$there"
    done

# Report which tools and kernel features for a container's root file system exist.
for each in squashfs overlay; do
    if grep -qw $each /proc/filesystems || modprobe -nq $each 2>/dev/null; then say has $each; fi
done
for each in unsquashfs squashfuse fuse-overlayfs; do if command -v $each >/dev/null; then say has $each; fi; done
if [ "$(cat /proc/sys/user/max_user_namespaces 2>/dev/null || echo 1)" != 0 ] &&
    [ "$(cat /proc/sys/kernel/unprivileged_userns_clone 2>/dev/null || echo 1)" != 0 ]; then
    say has namespaces
fi
# Report the path of `dalsegno` only if nobody else can write to it: jobs of all users run it.
if ours=$(command -v dalsegno); then
    open=$(open_part "$ours")
    if [ -z "$open" ]; then say dalsegno "$ours"; else say open "$open"; fi
fi
say end "$(uname -n)"
