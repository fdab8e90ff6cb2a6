#!/bin/sh
# What Debian's init runs first, by Debian's shell: it says what runs here, leaves a witness on the disk, and
# goes on as the client.
[ -d /proc/1 ] || mount -t proc proc /proc
init=$(readlink /proc/1/exe)
shell=$(readlink /proc/$$/exe)
echo "Debian $(cat /etc/debian_version) by $init and $shell"
case "${init##*/} ${shell##*/}" in
"init dash") ;;
*) echo "FAILED root its init is $init, and its shell $shell" ;;
esac
if grep -Eq '^/dev/(vda|root) / ext4 rw' /proc/mounts; then
    # In two parts, so that it is nowhere on the disk but where this was run.
    echo "written by the root's" "own programs" >/witness
    sync
else
    echo "FAILED root $(grep ' / ' /proc/mounts)"
fi
umount /proc
exec /init.client
