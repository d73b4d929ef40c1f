#!/bin/sh
# Make what the machines of a federation know each other by.
#
#   credentials.sh ca FOLDER                      ca.key, ca.crt: signs the server
#   credentials.sh server FOLDER ADDRESS...       server.key, server.crt for addresses
#   credentials.sh node FOLDER NAME               NAME.key, NAME.pub: one node
#
# Keys are readable by their owner only; nothing is ever overwritten. DAYS is how long a
# certificate holds: 3650 for the CA and 365 for the server unless it is set. A node's
# owner runs `node` on the node itself, and sends NAME.pub alone to the server's owner.
set -eu
umask 077

fail() {
    echo "credentials.sh: $*" >&2
    exit 1
}

# Make a folder, or take one that nobody else can change.
mine() {
    mkdir -p "$1"
    [ -O "$1" ] || fail "$1 belongs to somebody else"
    case $(ls -ldL "$1") in
    ?????w* | ????????w*) fail "others can write to $1: chmod go-w $1" ;;
    esac
}

fresh() {
    for path in "$@"; do
        [ ! -e "$path" ] || fail "$path exists and is not overwritten; move it away first"
    done
}

ca() {
    [ $# -eq 1 ] || fail "usage: credentials.sh ca FOLDER"
    mine "$1"
    fresh "$1/ca.key" "$1/ca.crt"
    openssl ecparam -name secp384r1 -genkey -noout -out "$1/ca.key"
    openssl req -x509 -new -sha384 -days "${DAYS:-3650}" -key "$1/ca.key" \
        -subj "/CN=Federation CA" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -out "$1/ca.crt"
    chmod 644 "$1/ca.crt"
}

server() {
    [ $# -ge 2 ] || fail "usage: credentials.sh server FOLDER ADDRESS..."
    folder=$1
    shift
    mine "$folder"
    [ -r "$folder/ca.key" ] || fail "$folder/ca.key is not there; make it with: ca $folder"
    fresh "$folder/server.key" "$folder/server.crt"
    names=
    for address in "$@"; do
        case $address in
        *[!A-Za-z0-9.:-]*) fail "$address is no address or name of a machine" ;;
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
        esac
        names="${names:+$names,}$kind:$address"
    done
    work=$(mktemp -d "$folder/.request.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    openssl ecparam -name secp384r1 -genkey -noout -out "$work/server.key"
    openssl req -new -key "$work/server.key" -subj "/CN=SuperLink" -out "$work/request"
    printf '%s\n' "subjectAltName=$names" "basicConstraints=critical,CA:FALSE" \
        "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth" \
        >"$work/extensions"
    serial=0x$(openssl rand -hex 16)
    openssl x509 -req -sha384 -days "${DAYS:-365}" -in "$work/request" \
        -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -set_serial "$serial" \
        -extfile "$work/extensions" -out "$work/server.crt" 2>"$work/errors" ||
        fail "$(cat "$work/errors")"
    chmod 644 "$work/server.crt"
    mv "$work/server.key" "$work/server.crt" "$folder"
}

node() {
    [ $# -eq 2 ] || fail "usage: credentials.sh node FOLDER NAME"
    case $2 in
    "" | .* | *[!A-Za-z0-9._-]*) fail "NAME=$2 must be letters, digits, '.', '_', '-'" ;;
    esac
    mine "$1"
    fresh "$1/$2.key" "$1/$2.pub"
    # Flower takes keys on the curves of NIST.
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "$2" -f "$1/$2.key"
    mv "$1/$2.key.pub" "$1/$2.pub"
    chmod 644 "$1/$2.pub"
}

case ${1:-} in
ca | server | node) "$@" ;;
*) fail "usage: credentials.sh ca|server|node FOLDER ..." ;;
esac
