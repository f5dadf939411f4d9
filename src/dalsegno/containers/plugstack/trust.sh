# Before ask.sh and install.sh: the first part of a path, links followed, that others than root and this user can write
# to; nothing if there is none. Whoever can write to a folder puts another thing there under the same name.
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
    group=0 # a group that is this user's alone, as many systems give one to each, is as good as root's
    if [ "$(id -gn)" = "$(id -un)" ]; then group=$(id -g); fi
    # In a folder like /tmp nobody can replace what is another's.
    find "$1" -maxdepth 0 \( ! -user 0 ! -user "$(id -u)" -o ! \( -type d -perm -1000 \) \
        \( -perm -002 -o -perm -020 ! -group 0 ! -group "$group" \) \) 2>&1
)
